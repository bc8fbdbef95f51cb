"""Attention over a KV cache."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def cached_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of causal attention for T new tokens after P cached ones, and the new cache: all keys and all
    values so far. New tokens see all cached tokens, and among the new ones themselves and those before.

    q, k, v (B, H, T, E) of the new tokens, keys and values (B, H, P, E) of the cache
    -> output (B, H, T, E), keys (B, H, P + T, E), values (B, H, P + T, E)
    """
    past = keys.shape[2]
    keys, values = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
    scores = q @ keys.mT / q.shape[-1] ** 0.5  # (B, H, T, P + T)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(past + 1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ values, keys, values


def draw(pick: Random) -> tuple[Tensor, ...]:
    T, past, E = pick.randint(1, 3), pick.randint(1, 3), 2
    new, cached = (1, 1, T, E), (1, 1, past, E)
    return *(torch.randn(new) for _ in range(3)), torch.randn(cached), torch.randn(cached)


EXERCISE = Exercise(
    chapter=10,
    answer=cached_attention,
    draw=draw,
    mistakes=(
        Mistake(
            "triu(past + 1)",
            "triu(1)",
            "the mask begins at the first cached token: shift it by P, since new token i is at position P + i",
        ),
        Mistake(
            "triu(past + 1)",
            "triu(past)",
            "the mask is off by one: a new token must also see itself",
        ),
        Mistake("triu(past + 1)", "triu(past + 2)", "the mask is off by one: each new token sees the next"),
        Mistake(
            "scores.masked_fill(later, -torch.inf)",
            "scores",
            "the mask is missing: of several new tokens, the first must not see the last",
        ),
        Mistake(
            "keys, values = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)",
            "past, keys, values = 0, k, v",
            "the cache is overwritten by the new keys and values: append them",
        ),
        Mistake(
            "return scores.masked_fill(later, -torch.inf).softmax(-1) @ values, keys, values",
            "return scores.masked_fill(later, -torch.inf).softmax(-1) @ values, k, v",
            "only the new keys and values are returned: return all of them, or the next token forgets the cached ones",
        ),
        Mistake(
            "return scores.masked_fill(later, -torch.inf).softmax(-1) @ values, keys, values",
            "return scores.masked_fill(later, -torch.inf).softmax(-1) @ values, keys[:, :, :past], values[:, :, :past]",
            "the cache is returned as it was: return the one with the new keys and values",
        ),
        Mistake(
            "torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)",
            "torch.cat((k, keys), dim=2), torch.cat((v, values), dim=2)",
            "the new keys and values come before the cached ones: append them",
        ),
        Mistake(
            "torch.cat((values, v), dim=2)",
            "torch.cat((values, k), dim=2)",
            "keys are appended to the values: append v",
        ),
        Mistake(" / q.shape[-1] ** 0.5", "", "the scale is missing: divide the scores by √E"),
        Mistake("q.shape[-1] ** 0.5", "q.shape[-1]", "the scores are divided by E: divide them by its root"),
        Mistake(
            "-torch.inf", "0.0", "scores of later tokens are 0, which the softmax makes exp(0) = 1: set them to −∞"
        ),
        Mistake(
            "scores.masked_fill(later, -torch.inf).softmax(-1)",
            "scores.softmax(-1).masked_fill(later, 0.0)",
            "the mask comes after the softmax, so that the weights of a row sum to less than 1: mask the scores first",
        ),
    ),
)
