"""The causal mask with a window."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def causal_mask(length: int, window: int) -> Tensor:
    """Return the mask of a decoder whose tokens see themselves and the tokens before, `window` tokens in all.

    (T, T) of bool, T = length: row i, column j is True if token i may look at token j
    """
    query, key = torch.arange(length)[:, None], torch.arange(length)
    return (key <= query) & (query - key < window)


def draw(pick: Random) -> tuple[int, int]:
    length = pick.randint(3, 6)
    return length, pick.randint(1, length + 1)


EXERCISE = Exercise(
    chapter=3,
    answer=causal_mask,
    draw=draw,
    mistakes=(
        Mistake("key <= query", "key < query", "off by one: a token sees itself too, so that the diagonal is True"),
        Mistake("key <= query", "key <= query + 1", "off by one: token i sees token i + 1, which it should predict"),
        Mistake("query - key < window", "query - key <= window", "off by one: the window includes the token itself"),
        Mistake(" & (query - key < window)", "", "the window has no effect: hide keys that are window or more before"),
        Mistake("(key <= query) & ", "", "later tokens are visible: a key must not come after its query"),
        Mistake(
            "[:, None], torch.arange(length)",
            ", torch.arange(length)[:, None]",
            "rows and columns are exchanged: a row is a query",
        ),
        Mistake(
            "(key <= query) & (query - key < window)",
            "~((key <= query) & (query - key < window))",
            "the mask is inverted: True means that a token may look",
        ),
        Mistake(
            "return (key <= query) & (query - key < window)",
            "return torch.zeros(length, length).masked_fill(~((key <= query) & (query - key < window)), -torch.inf)",
            "these are numbers to be added to scores: return True where a token may look",
        ),
        Mistake(
            "(key <= query) & (query - key < window)",
            "(query - key).abs() < window",
            "the window reaches to both sides: a key must not come after its query",
        ),
        Mistake(
            "key <= query",
            "key >= query",
            "tokens see later ones instead of earlier ones: use key <= query, or tril instead of triu",
        ),
    ),
)
