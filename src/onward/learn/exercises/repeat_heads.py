"""Grouped-query attention: heads of queries that share keys and values."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def repeat_heads(k: Tensor, n_heads: int) -> Tensor:
    """Repeat the heads of keys or values for grouped-query attention. Adjacent query heads share a head: with two heads
    of keys, the first half of the query heads uses the first one.

    k (B, G, T, E) -> (B, H, T, E), H = n_heads, a multiple of G
    """
    return k.repeat_interleave(n_heads // k.shape[1], dim=1)


def draw(pick: Random) -> tuple[Tensor, int]:
    G = pick.randint(2, 3)
    return torch.randn(1, G, pick.randint(1, 2), 2), G * pick.randint(2, 3)


EXERCISE = Exercise(
    chapter=10,
    answer=repeat_heads,
    draw=draw,
    mistakes=(
        Mistake(
            "k.repeat_interleave(n_heads // k.shape[1], dim=1)",
            "k.repeat(1, n_heads // k.shape[1], 1, 1)",
            "the order is 1, 2, 1, 2: adjacent heads share, so that it is 1, 1, 2, 2 (repeat_interleave)",
        ),
        Mistake("// k.shape[1], dim=1", "// k.shape[1], dim=2", "tokens are repeated: repeat heads, axis 1"),
        Mistake("n_heads // k.shape[1]", "n_heads", "each head is repeated H times: repeat it H / G times"),
        Mistake(
            "// k.shape[1], dim=1", "// k.shape[1], dim=-1", "the numbers of a head are repeated: repeat heads, axis 1"
        ),
        Mistake("n_heads // k.shape[1]", "k.shape[1]", "each head is repeated G times: repeat it H / G times"),
    ),
)
