"""The choices of `DecoderConfig.position` that add vectors to the embeddings. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from onward.base.errors import UserError
from onward.config.part_types import ConfigFields, Position
from onward.config.ranges import Base, SizeOrZero


@dataclass(frozen=True)
class Learned(Position, kind="learned"):
    """A trained vector per position (GPT). It is added to the embedding of the token at this position."""

    added: ClassVar[bool] = True
    offset: SizeOrZero = 0  # position p uses row p + offset (OPT: 2)

    def limit(self, config: ConfigFields) -> float:
        return config.context_length

    def describe(self, config: ConfigFields) -> str:
        return self.in_words(f"{config.context_length:,} vectors")


@dataclass(frozen=True)
class Sinusoidal(Position, kind="sinusoidal"):
    """Fixed sines and cosines of each position (Vaswani et al. 2017, section 3.5). They form a vector that is added to
    the embedding of the token."""

    added: ClassVar[bool] = True
    theta: Base = 10_000.0  # wavelengths range from 2 pi to almost 2 pi theta
    offset: SizeOrZero = 0  # number added to each position (XGLM: 2)
    order: Literal["pairs", "halves"] = "pairs"  # sine and cosine side by side, or all sines first (CTRL)

    def check(self, config: ConfigFields) -> None:
        if config.d_model % 2:
            raise UserError(f"d_model is {config.d_model}: sinusoidal positions need an even width")
