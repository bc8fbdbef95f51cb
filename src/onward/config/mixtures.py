"""Config classes for the sampling weights of a mixture's sources. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.base.fields import Part

RunFraction = Annotated[float, Range(0, 1)]  # of a run
WeightOrZero = Annotated[float, Range(0, 1e9)]
Points = tuple[tuple[float, float], ...]  # fractions of the run, ascending, each with the weight there


class MovingWeight(Part):
    """Base class of the weights of a data source in a mixture that change during a training run; a source is sampled in
    proportion to its weight."""

    def points(self) -> Points:
        """Return the weight as a piecewise linear function: its corners as pairs (fraction of the run, weight),
        ascending, with linear interpolation between them."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ramp(MovingWeight, kind="ramp"):
    """A weight that is `first` until the fraction `begin` of the run, changes linearly to `last` until `end`, and stays
    there."""

    first: WeightOrZero = 0.0
    last: WeightOrZero = 1.0
    begin: RunFraction = 0.0  # fraction of the run after which the weight begins to change
    end: RunFraction = 1.0  # fraction of the run at which the change ends; equal to begin: a sudden change

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.begin > self.end:
            raise UserError(f"begin is {self.begin} and end is {self.end}: begin must not be after end")

    def points(self) -> Points:
        return (0.0, self.first), (self.begin, self.first), (self.end, self.last), (1.0, self.last)


def check_weights(weights: Sequence[float | MovingWeight]) -> None:
    """Raise a UserError if, in some part of a training run, the weights of all data sources of a mixture are 0."""
    corners = sorted({share for weight in weights for share, _ in points_of(weight)})
    for begin, end in pairwise(corners):
        if not any(at(points_of(weight), (begin + end) / 2) for weight in weights):
            raise UserError(f"all weights are 0 from {begin:.0%} to {end:.0%} of the run: give a source a weight there")


def at(points: Points, share: float) -> float:
    """The weight at a fraction of the run strictly between two corners, by linear interpolation."""
    (begin, first), (end, last) = next(p for p in pairwise(points) if p[0][0] < share < p[1][0])
    return first + (last - first) * (share - begin) / (end - begin)


def points_of(weight: float | MovingWeight) -> Points:
    return weight.points() if isinstance(weight, MovingWeight) else ((0.0, weight), (1.0, weight))
