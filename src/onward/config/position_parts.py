"""The choices of `DecoderConfig.position` except those in `added_positions.py`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.base.fields import text
from onward.config.part_types import ConfigFields, Position, each
from onward.config.ranges import Base
from onward.config.scaling import Scaling


@dataclass(frozen=True)
class Rotary(Position, kind="rotary"):
    """Queries and keys rotated by angles proportional to the position (RoFormer, Su et al. 2021); element i is paired
    with element i + rope_dim / 2."""

    theta: Base = 10_000.0  # base of the frequencies; the larger, the slower the rotation
    fraction: Annotated[float, Range(1e-6, 1)] = 1.0  # fraction of each head's elements that are rotated
    scaling: Scaling | None = None  # change of the frequencies for contexts longer than in training

    def rope_dim(self, width: int) -> int:
        """Return the number of rotated elements of a head with `width` elements."""
        return int(width * self.fraction)

    def describe(self, config: ConfigFields) -> str:
        return self.in_words(f"theta {text(self.theta)}", shown=("theta",))

    def check(self, config: ConfigFields) -> None:
        for head in {attention.rope_width(config) for attention in each(config.attention)}:
            if (width := self.rope_dim(head)) % 2 or not width:
                raise UserError(
                    f"position.rotary rotates {width} of the {head} elements of a head (fraction {self.fraction}), "
                    "which must be an even number: change d_head or fraction"
                )
            if self.scaling:
                self.scaling.check(width // 2)


@dataclass(frozen=True)
class Alibi(Position, kind="alibi"):
    """Attention scores lowered by the distance between query and key times a slope per head (Press et al. 2021)."""

    steepness: Annotated[float, Range(1e-6, 100)] = 8.0  # the last head's slope is 2 ** -steepness


@dataclass(frozen=True)
class NoPosition(Position, kind="none"):
    """No positions: the order enters only through the causal mask (NoPE, Kazemnejad et al. 2023)."""
