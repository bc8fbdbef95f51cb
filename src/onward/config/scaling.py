"""Rotary scalings: frequencies of rotary positions for contexts longer than in training. Does not import torch.

`model/frequencies.py` computes the frequencies. Shapes: B rows, P pairs of elements that are rotated together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.base.fields import Part
from onward.config.part_types import OwnMethod
from onward.config.ranges import Factor, Size


class Scaling(Part):
    """How the frequencies of rotary positions, in radians per position, change for contexts longer than in training.

    `frequencies(plain, theta, rope_length)` of a scaling of your own returns the frequencies of the P rotated pairs,
    (P,) or (B, 1, P), in place of the unscaled ones `plain` (P,), which are theta ** (-p / P); `rope_length` (B, 1, 1)
    is the length in tokens for which each row is scaled.
    """

    frequencies: ClassVar[OwnMethod] = None

    @property
    def magnitude(self) -> float:
        """The factor that multiplies the cosines and sines of rotary positions, and thereby queries and keys; 1 for
        most scalings."""
        return 1.0

    def check(self, pairs: int) -> None:
        """Raise a UserError if a field of this scaling is out of range; `pairs` is the number of pairs of elements of a
        head that are rotated."""


@dataclass(frozen=True)
class LinearScaling(Scaling, kind="linear"):
    """Positions divided by the factor (position interpolation, Chen et al. 2023)."""

    factor: Factor = 1.0  # divisor of the positions


@dataclass(frozen=True)
class ProportionalScaling(Scaling, kind="proportional"):
    """Only the first pairs, a fraction of all, are rotated, with the frequencies that they have if all pairs are
    rotated; the other pairs are not rotated (Gemma 4)."""

    fraction: Annotated[float, Range(1e-6, 1)] = 0.25  # fraction of the pairs that are rotated
    factor: Factor = 1.0  # divides the frequencies


@dataclass(frozen=True)
class DynamicScaling(Scaling, kind="dynamic"):
    """A base of the frequencies that grows with the length of a row beyond the original context (dynamic NTK, Peng et
    al. 2023). A row is one sequence of a batch."""

    factor: Factor = 1.0  # how fast the base grows with the length
    original: Size = 2048  # the context length in training

    def check(self, pairs: int) -> None:
        if pairs < 2:
            raise UserError(
                "position.rotary.scaling.dynamic needs at least 4 rotated elements per head: change d_head or fraction"
            )


@dataclass(frozen=True)
class YaRNScaling(Scaling, kind="yarn"):
    """Slowly rotating pairs are interpolated, fast ones unchanged, with a ramp between (YaRN, Peng et al. 2023). An
    interpolated frequency is divided by the factor."""

    factor: Factor = 1.0  # divisor of the interpolated frequencies
    original: Size = 2048  # the context length in training
    beta_fast: Factor = 32.0  # pairs with at least this many rotations in the original context are unchanged
    beta_slow: Factor = 1.0  # pairs with fewer rotations than this are interpolated
    truncate: bool = True  # round the ends of the ramp to whole pairs
    attention_factor: Factor | None = None  # multiplies cosines and sines; none: 0.1 ln(factor) + 1

    @property
    def magnitude(self) -> float:
        return yarn_magnitude(self.factor) if self.attention_factor is None else self.attention_factor


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines for a context `factor` times longer than in training: 0.1 * weight *
    ln(factor) + 1, or 1 if `factor` is at most 1. `weight` is 1 in YaRN (equation 22 of its second
    version); DeepSeek's config.json gives other values."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


@dataclass(frozen=True)
class Llama3Scaling(Scaling, kind="llama3"):
    """Long wavelengths are interpolated, short ones unchanged, with a blend between (Llama 3.1, Dubey et al. 2024). An
    interpolated frequency is divided by the factor."""

    factor: Factor = 8.0  # divisor of the interpolated frequencies
    low_frequency: Factor = 1.0  # wavelengths above original / low_frequency are interpolated
    high_frequency: Factor = 4.0  # wavelengths below original / high_frequency are unchanged
    original: Size = 8192  # the context length in training

    def check(self, pairs: int) -> None:
        if self.low_frequency >= self.high_frequency:
            raise UserError(
                f"position.rotary.scaling.llama3 has low_frequency {self.low_frequency} and high_frequency "
                f"{self.high_frequency}: low_frequency must be less than high_frequency"
            )


@dataclass(frozen=True)
class LongRoPEScaling(Scaling, kind="longrope"):
    """Frequencies divided by a factor per rotated pair, found by search: one list for rows up to the original length,
    one for longer rows (Ding et al. 2024)."""

    short: tuple[Factor, ...] = ()  # factors for rows up to the original length
    long: tuple[Factor, ...] = ()  # factors for longer rows
    original: Size = 4096  # the context length in training
    attention_factor: Factor = 1.0  # multiplies cosines and sines

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def check(self, pairs: int) -> None:
        if not len(self.short) == len(self.long) == pairs:
            raise UserError(
                f"position.rotary.scaling.longrope has {len(self.short)} short and {len(self.long)} long factors: "
                f"give {pairs} of each, one for each rotated pair"
            )
