"""The types of parts of a DecoderConfig, and the methods that every part of a type has. Does not import torch.

Parts are values: `model/` builds their modules and computes rotations, biases and frequencies. A part of your own may
define its own methods for this; in the parts of `config/` these methods are None.
Shapes: B batch, T tokens in this call, S keys, D d_model, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from onward.base.fields import Part, changed_fields, text
from onward.config.sizes import Sizes

P = TypeVar("P", bound=Part)
States = dict[str, tuple[tuple[int, ...], str | None]]  # shape and dtype by name
OwnMethod = Callable[..., Any] | None  # a method that a part of your own may define; None: the code of `model/` runs


def at(parts: P | tuple[P, ...], layer: int) -> P:
    """The part that `layer` uses: a tuple of parts repeats over the layers."""
    return parts[layer % len(parts)] if isinstance(parts, tuple) else parts


def each(parts: P | tuple[P, ...]) -> tuple[P, ...]:
    return parts if isinstance(parts, tuple) else (parts,)


class ConfigFields(Sizes, Protocol):
    """Protocol with the fields of DecoderConfig that its parts, such as Attention, read. Annotations of parts use it in
    place of DecoderConfig, to avoid a circular import."""

    @property
    def position(self) -> Position | tuple[Position, ...]: ...
    @property
    def attention(self) -> Attention | tuple[Attention, ...]: ...
    @property
    def norm(self) -> Norm | tuple[Norm, ...]: ...
    @property
    def block(self) -> Block | tuple[Block, ...]: ...


class DecoderPart(Part):
    """Base class of the parts of a DecoderConfig, such as its attention or its norm: a choice and its options, as a
    value.

    `build(config, layer)` of a part of your own returns its `torch` module; `model/build.py` builds the modules of
    Onward's parts.
    """

    build: ClassVar[OwnMethod] = None
    sizes: ClassVar[tuple[str, ...]] = ()  # fields that override the config's size of the same name unless 0

    def check(self, config: ConfigFields) -> None:
        """Raise a UserError if a field of this part is out of range or does not fit the sizes of the config."""

    def without_repeated_sizes(self, config: ConfigFields) -> Self:
        """Return this part with 0 in place of sizes that equal those of the config, so that equal decoders have equal
        fields."""
        repeated = [name for name in self.sizes if getattr(self, name) == getattr(config, name)]
        return replace(self, **dict.fromkeys(repeated, 0)) if repeated else self  # type: ignore[type-var]

    def describe(self, config: ConfigFields) -> str:
        """Return this part as one line for `onward models` and `onward plan`: its kind, its sizes in a decoder of this
        config, and the fields that differ from their defaults."""
        return self.in_words()

    def in_words(self, *sizes: str, shown: tuple[str, ...] = ()) -> str:
        """Return this part's kind, the given texts `sizes`, such as "8 heads of 64", and the fields that differ from
        their defaults, joined by commas. Fields named in `shown` are left out, since `sizes` contains their values."""
        fields = [f"{name} {text(value)}" for name, value in changed_fields(self).items() if name not in shown]
        return ", ".join([self.kind.replace("_", " "), *sizes, *fields])


class Position(DecoderPart):
    """How positions enter: vectors added to the embeddings, a rotation of queries and keys, a bias, or not at all.

    A part of your own may define three things:
    - `build`: a module from positions (B, T) and a dtype to the vectors (B, T, D) that are added to the embeddings;
    - `rotation(width, positions, rope_length)`: cosines and sines, each (B, T, 1, rope_dim / 2), or None. `positions`
      (B, T) and `rope_length` (B, 1, 1), the length for which each row's frequencies are scaled, have the dtype to
      compute in, at least fp32. `width` is the attention's `rope_width`;
    - `slopes(config, device)`: one number per head, (H,), or None for no bias; and
      `score_bias(config, slope, query, key)`: the bias of a score, elementwise, from the slope of its head and the
      positions of its query and key, in at least fp32. The arguments broadcast: a dense bias has (H, 1, 1),
      (B, 1, T, 1) and (B, 1, 1, S), and FlexAttention passes single numbers.
    """

    added: ClassVar[bool] = False  # whether a module's vectors are added to the embeddings
    rotation: ClassVar[OwnMethod] = None
    slopes: ClassVar[OwnMethod] = None
    score_bias: ClassVar[OwnMethod] = None

    def limit(self, config: ConfigFields) -> float:
        """Return the number of positions that the part supports, such as the rows of a learned table; infinite if there
        is no limit."""
        return math.inf


class HeadSizes(NamedTuple):
    """The sizes of the heads of one layer."""

    n_heads: int  # number of query heads
    n_kv_heads: int  # number of key/value heads
    d_head: int  # width of a query and of a key
    d_value: int  # width of a value


class Attention(DecoderPart):
    """How a token reads from itself and the tokens before it: a module from x (B, T, D) and an AttentionContext
    (positions, mask and cache of the call) to (B, T, D)."""

    window: int = 0  # number of tokens that a token attends to, itself included; 0: no limit
    chunked: bool = False  # whether a token attends only to tokens of the same chunk of `window` positions
    shares_kv: bool = False  # whether the layer uses the keys and values of an earlier one

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that the KV cache stores for each token and layer, by name, such as {"k":
        (n_kv_heads, d_head), ...}; {} if it stores none. Those of a part of your own are found in a trial forward
        pass."""
        return {}

    def heads(self, config: ConfigFields) -> HeadSizes:
        """Return the sizes of the heads of a layer with this part: its own sizes, or those of the config."""
        return HeadSizes(config.n_heads, config.n_kv_heads, config.d_head, config.d_head)

    def states(self, config: ConfigFields) -> States:
        """Return the shape of each state that the cache keeps for each row and layer, by name, and its minimum dtype,
        such as {"state": ((heads, d_key, d_value), "float32")}; None stands for the dtype of the cache. Self-attention
        has no states."""
        return {}

    def rope_width(self, config: ConfigFields) -> int:
        """Return the width of the part of each query and key to which rotary positions apply: d_head for
        self-attention, less for latent attention."""
        return self.heads(config).d_head

    def key_flops(self, config: ConfigFields, decoding: bool = False) -> int:
        """Return the floating-point operations of all heads for one pair of a query and a key with its value: the score
        and the weighted sum. With `decoding`, a single query reads keys from a cache, which costs more in latent
        attention."""
        heads = self.heads(config)
        return 2 * heads.n_heads * (heads.d_head + heads.d_value)

    def state_flops(self, config: ConfigFields) -> int:
        """Return the floating-point operations per token for updating and reading the states, without products with
        weights; 0 for a part without states."""
        return 0


class FeedForward(DecoderPart):
    """A function that is applied to the vector of each token separately: a module from x (..., D) to (..., D)."""

    d_ff: int = 0  # width inside; 0: the config's d_ff

    def width(self, config: ConfigFields) -> int:
        """Return the width inside a feed-forward with this part: its own, or the config's d_ff."""
        return self.d_ff or config.d_ff


class Norm(DecoderPart):
    """How a vector is normalized: a module that normalizes the last dimension.

    `build(config, layer, width)` of a norm of your own returns the module; `width` is the size of that dimension, 0 for
    d_model.
    """


class Block(DecoderPart):
    """The arithmetic of the residual stream in one layer, with attention, feed-forward and norms: a module from x (B,
    T, D) and an AttentionContext (positions, mask and cache of the call) to (B, T, D)."""

    additions: ClassVar[int] = 2  # number of additions to the residual stream
