"""Int8 weights."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Store a matrix as integers from −127 to 127 and one scale per row, so that integers · scale ≈ weight. The largest
    number of a row, by size, becomes 127 or −127; the others are rounded.

    weight (O, I) -> integers (O, I), scales (O, 1)
    """
    scales = weight.abs().amax(-1, keepdim=True) / 127
    return (weight / scales).round().to(torch.int8), scales


def draw(pick: Random) -> tuple[Tensor]:
    """A case in which no number is halfway between two integers."""
    while True:
        weight = torch.randn(2, pick.randint(3, 4)) * torch.tensor([[1.0], [3.0]])
        ratio = weight / weight.abs().amax(-1, keepdim=True) * 127
        if ((ratio % 1) - 0.5).abs().min() > 0.001:
            return (weight,)


EXERCISE = Exercise(
    chapter=11,
    answer=quantize,
    draw=draw,
    mistakes=(
        Mistake(
            "abs().amax(-1, keepdim=True)",
            "abs().max()",
            "one scale for the matrix: each row has its own",
        ),
        Mistake(
            "weight.abs().amax", "weight.amax", "the largest number is taken with its sign: take it of weight.abs()"
        ),
        Mistake("/ 127", "/ 128", "128 does not fit: int8 ends at 127, and 128 becomes −128"),
        Mistake(".round().to", ".to", "numbers are cut toward zero: round them"),
        Mistake(".round()", ".floor()", "numbers are rounded down: round them to the nearest"),
        Mistake(", scales\n", ", 1 / scales\n", "the scale is inverted: integers · scale is the weight"),
        Mistake("(weight / scales)", "(weight * scales)", "the weight is multiplied by the scale: divide it"),
        Mistake("amax(-1, keepdim=True)", "amax(0, keepdim=True)", "one scale per column: each row has its own"),
        Mistake(" / 127", "", "the scale is the largest number of the row: divide it by 127"),
        Mistake(
            "(weight / scales).round().to(torch.int8)",
            "weight / scales",
            "numbers are not rounded: round them to integers",
        ),
    ),
)
