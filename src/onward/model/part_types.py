"""The slots of a DecoderConfig: what each choice must be able to do. Does not import torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, TypeVar

from onward.fields import Part

if TYPE_CHECKING:
    from torch import Tensor, nn

    from onward.model.config import DecoderConfig

P = TypeVar("P", bound=Part)


def at(parts: P | tuple[P, ...], layer: int) -> P:
    """The part of a layer: the one there is or, of several, the one whose turn it is."""
    return parts[layer % len(parts)] if isinstance(parts, tuple) else parts


def each(parts: P | tuple[P, ...]) -> tuple[P, ...]:
    """The parts that there are, be it one or several."""
    return parts if isinstance(parts, tuple) else (parts,)


class DecoderPart(Part):
    """A choice for a slot of a DecoderConfig."""

    def check(self, config: DecoderConfig) -> None:
        """Raise a UserError where this part and the sizes contradict each other."""


class Position(DecoderPart):
    """How the order of the tokens enters: added to the embeddings, as a rotation, as a bias, or not at all."""

    added: ClassVar[bool] = False  # to the embeddings, once and not layer by layer

    def build(self, config: DecoderConfig, layer: int) -> nn.Module | None:
        """A module from positions (B, T) and a dtype to vectors (B, T, D) added to the embeddings, or None."""
        return None

    def rotation(self, width: int, positions: Tensor, rope_length: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines, each (B, T, 1, rope_dim / 2), or None.

        `positions` (B, T) and `rope_length` (B, 1, 1), the length that each row is made for, are in the precision to
        compute in, at least fp32.
        """
        return None

    def bias(self, config: DecoderConfig, query: Tensor, key: Tensor) -> Tensor | None:
        """What is added to the scores of queries at positions (B, T) for keys at positions (B, S): (B, H, T, S), or
        None. Positions are in the precision to compute in, at least fp32."""
        return None

    def limit(self, config: DecoderConfig) -> float:
        """How many positions there are."""
        return math.inf


class Attention(DecoderPart):
    """How a token reads from those before it."""

    window: int = 0

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        """A module from x (B, T, D) and a View to (B, T, D)."""
        raise NotImplementedError

    def entries(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """The shape of what the cache keeps for each token."""
        raise NotImplementedError

    def rope_width(self, config: DecoderConfig) -> int:
        """How wide the vectors are that a rotary position turns."""
        return config.d_head


class FeedForward(DecoderPart):
    """What happens to each token by itself."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        """A module from x (..., D) to (..., D)."""
        raise NotImplementedError


class Norm(DecoderPart):
    """How a vector is brought to a common size."""

    def build(self, config: DecoderConfig, layer: int, width: int = 0) -> nn.Module:
        """A module over the last dimension; `width` is d_model by default."""
        raise NotImplementedError


class Block(DecoderPart):
    """The arithmetic of the residual stream in one layer."""

    additions: ClassVar[int] = 2  # to the residual stream

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        """A module from x (B, T, D) and a View to (B, T, D)."""
        raise NotImplementedError
