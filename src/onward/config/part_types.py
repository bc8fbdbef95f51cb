"""The types of parts of a DecoderConfig, and the methods that every part of a type has. Does not import torch.

Shapes: B batch, T tokens in this call, S keys, D d_model, H heads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

from onward.arguments import Range
from onward.fields import Part, changed_fields, text

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from onward.config.decoder import DecoderConfig

P = TypeVar("P", bound=Part)
MOST = 2**31 - 1
Size = Annotated[int, Range(1, MOST)]
SizeOrZero = Annotated[int, Range(0, MOST)]  # what 0 means, the field says
Epsilon = Annotated[float, Range(1e-30, 1)]  # of a norm
Factor = Annotated[float, Range(1e-6, 1e6)]  # multiplies or divides activations, scores or frequencies
Rate = Annotated[float, Range(0, 0.999)]  # of dropout
Offset = Annotated[float, Range(-1e6, 1e6)]  # of a norm's weight
Base = Annotated[float, Range(2, 1e30)]  # of the wavelengths of sinusoidal and rotary positions


def at(parts: P | tuple[P, ...], layer: int) -> P:
    """The part of a layer: `parts` itself or, of a tuple, parts[layer % len(parts)]."""
    return parts[layer % len(parts)] if isinstance(parts, tuple) else parts


def each(parts: P | tuple[P, ...]) -> tuple[P, ...]:
    """The parts as a tuple, of one element where `parts` is a single part."""
    return parts if isinstance(parts, tuple) else (parts,)


class DecoderPart(Part):
    """A part of a DecoderConfig."""

    def check(self, config: DecoderConfig) -> None:
        """Raise a UserError where a field is out of range or does not fit the sizes of the config."""

    def describe(self, config: DecoderConfig) -> str:
        """One line: the kind, the sizes in this decoder, and the fields that differ from their defaults."""
        return self.in_words()

    def in_words(self, *sizes: str, shown: tuple[str, ...] = ()) -> str:
        """The kind, the sizes, and the fields that differ from their defaults but are not `shown` in the sizes."""
        fields = [f"{name} {text(value)}" for name, value in changed_fields(self).items() if name not in shown]
        return ", ".join([self.kind.replace("_", " "), *sizes, *fields])


class Position(DecoderPart):
    """How positions enter: vectors added to the embeddings, a rotation of queries and keys, a bias, or not at all."""

    added: ClassVar[bool] = False  # whether `build` gives a module whose vectors are added to the embeddings

    def build(self, config: DecoderConfig, layer: int) -> nn.Module | None:
        """A module from positions (B, T) and a dtype to the vectors (B, T, D) that are added to the embeddings, or
        None."""
        return None

    def rotation(self, width: int, positions: Tensor, rope_length: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines, each (B, T, 1, rope_dim / 2), or None.

        `positions` (B, T) and `rope_length` (B, 1, 1), the length for which each row's frequencies are scaled, have the
        dtype to compute in, at least fp32.
        """
        return None

    def slopes(self, config: DecoderConfig, device: torch.device) -> Tensor | None:
        """One number per head, (H,), the `slope` of `score_bias`; None: the scores have no bias."""
        return None

    def score_bias(self, config: DecoderConfig, slope: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The bias of a score, elementwise, from the slope of its head and the positions of its query and key.

        Positions have the dtype to compute in, at least fp32. The arguments broadcast: a dense bias has
        (H, 1, 1), (B, 1, T, 1) and (B, 1, 1, S), and FlexAttention calls it with single numbers.
        """
        raise NotImplementedError

    def limit(self, config: DecoderConfig) -> float:
        """The number of positions that exist; infinite where every position does."""
        return math.inf


class Attention(DecoderPart):
    """How a token reads from the tokens before it."""

    window: int = 0  # number of tokens that a token attends to, itself included; 0: all before it

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        """A module from x (B, T, D) and an AttentionContext to (B, T, D)."""
        raise NotImplementedError

    def entries(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that the cache keeps for each token, by name."""
        raise NotImplementedError

    def rope_width(self, config: DecoderConfig) -> int:
        """The width of the vectors to which a rotary position applies."""
        return config.d_head

    def key_flops(self, config: DecoderConfig, decoding: bool = False) -> int:
        """Floating-point operations of all heads for one query and one key with its value; `decoding`: there is one
        query, and the keys are in a cache."""
        return 4 * config.n_heads * config.d_head


class FeedForward(DecoderPart):
    """A function that is applied to the vector of each token separately."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        """A module from x (..., D) to (..., D)."""
        raise NotImplementedError


class Norm(DecoderPart):
    """How a vector is normalized."""

    def build(self, config: DecoderConfig, layer: int, width: int = 0) -> nn.Module:
        """A module over the last dimension; `width` is d_model by default."""
        raise NotImplementedError


class Block(DecoderPart):
    """The arithmetic of the residual stream in one layer."""

    additions: ClassVar[int] = 2  # number of additions to the residual stream

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        """A module from x (B, T, D) and an AttentionContext to (B, T, D)."""
        raise NotImplementedError
