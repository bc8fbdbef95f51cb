"""The mask of a row of tokens under packing, windows and chunks."""

from itertools import pairwise

import torch
from torch import Tensor

from onward.learn.interactive.figure import InteractiveFigure
from onward.model.mask import AttentionMask
from onward.model.segments import Segments

KINDS = {"all earlier tokens": False, "a window": False, "a chunk": True}  # whether the mask is chunked


def mask_grid(length: int = 12, packed: int = 4) -> InteractiveFigure:
    """The decoder's mask for `length` tokens in one to `packed` documents, in which tokens see all earlier tokens, a
    window or a chunk; and the tokens reached through several layers."""
    masks = [
        [
            [bits(mask(positions_of(length, documents), size, chunked)) for size in sizes]
            for sizes, chunked in zip(([0], range(1, length + 1), range(1, length + 1)), KINDS.values())
        ]
        for documents in range(1, packed + 1)
    ]
    return InteractiveFigure(
        "masks",
        f"The mask of {length} tokens",
        "Each row is a token that looks, each column a token that it may look at. Strong color: seen in one layer. "
        "Weak color: reached through more layers.",
        {"length": length, "kinds": [*KINDS], "masks": masks},
    )


def positions_of(length: int, documents: int) -> Tensor:
    """The positions (1, T) of packed documents of about the same length: each begins again at 0."""
    ends = [round(length * i / documents) for i in range(documents + 1)]
    return torch.cat([torch.arange(end - start) for start, end in pairwise(ends)])[None]


def mask(positions: Tensor, size: int, chunked: bool) -> Tensor:
    """The mask (T, T) of tokens at these positions, with a window or chunks of `size` (0: none)."""
    return AttentionMask(positions, positions, size, chunked=chunked, segments=Segments.of(positions)).visible()[0]


def bits(rows: Tensor) -> list[str]:
    return ["".join("01"[seen] for seen in row) for row in rows.int().tolist()]
