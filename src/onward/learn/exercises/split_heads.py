"""From one vector per token to one per token and head."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """Cut the vector of each token into heads: the first E numbers belong to the first head, the next E to the second.

    x (B, T, D) -> (B, H, T, E), H = n_heads, E = D / H
    """
    B, T, D = x.shape
    return x.view(B, T, n_heads, D // n_heads).transpose(1, 2)


def draw(pick: Random) -> tuple[Tensor, int]:
    n_heads = pick.randint(2, 3)
    return torch.randn(pick.randint(1, 2), pick.randint(2, 3), n_heads * 2), n_heads


EXERCISE = Exercise(
    chapter=4,
    answer=split_heads,
    draw=draw,
    mistakes=(
        Mistake(
            "x.view(B, T, n_heads, D // n_heads).transpose(1, 2)",
            "x.reshape(B, n_heads, T, D // n_heads)",
            "the shape is right, but heads get numbers of other tokens: view as (B, T, H, E), then transpose",
        ),
        Mistake(".transpose(1, 2)", "", "heads come after tokens: transpose the axes 1 and 2"),
        Mistake(
            "x.view(B, T, n_heads, D // n_heads).transpose(1, 2)",
            "x.view(B, T, D // n_heads, n_heads).permute(0, 3, 1, 2)",
            "a head gets every H-th number: split the last axis into H pieces of E adjacent numbers",
        ),
        Mistake(
            "x.view(B, T, n_heads, D // n_heads).transpose(1, 2)",
            "x.view(B, T, D // n_heads, n_heads).transpose(1, 2)",
            "H and E are exchanged: view as (B, T, H, E)",
        ),
        Mistake(
            "x.view(B, T, n_heads, D // n_heads).transpose(1, 2)",
            "torch.stack(x.chunk(n_heads, dim=-1))",
            "heads come before texts: stack them along axis 1",
        ),
    ),
)
