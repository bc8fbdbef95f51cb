"""Rotary positions: the angle of each pair, and the score of a query and a key, by distance."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.learn.interactive.figure import InteractiveFigure
from onward.model.context import angles_at

BASES = 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0, 500_000.0, 1_000_000.0


def rotary_pairs(query: Tensor, key: Tensor, trained: int, bases: Sequence[float] = BASES) -> InteractiveFigure:
    """The rotation of a query and a key (E,), whose pairs are the numbers i and i + E/2, for each distance up to four
    times the `trained` length and each base of the frequencies."""
    q, k = (torch.complex(*one.double().chunk(2)) for one in (query, key))
    one = torch.ones(1, 1, dtype=torch.float64)
    return InteractiveFigure(
        "rotary",
        f"{len(q)} pairs of a query and a key, rotated by their distance",
        "A dial is a pair: its hand turns by the pair's frequency for each token of distance, and its label is the "
        "number of tokens of a full turn. The score is the sum over the pairs.",
        {
            "products": torch.view_as_real(q * k.conj()).tolist(),
            "trained": trained,
            "bases": [*bases],
            "frequencies": [angles_at(one, base, len(query))[0, 0].tolist() for base in bases],
        },
    )
