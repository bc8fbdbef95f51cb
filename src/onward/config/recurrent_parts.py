"""The choices of `DecoderConfig.attention` that keep a state of fixed size instead of keys and values. Does not import
torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from onward.base.errors import UserError
from onward.config.attention_parts import SelfAttention
from onward.config.part_types import Attention, ConfigFields, HeadSizes, States
from onward.config.ranges import Epsilon, Factor, NotNegative, Size, SizeOrZero


@dataclass(frozen=True)
class Recurrent(Attention, kind=""):
    """Base class of the token mixers whose cache is a state of each row: it has the same size at any length."""

    corrects: ClassVar[bool] = False  # whether a token reads the value of its key before replacing it

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        return {}

    def key_flops(self, config: ConfigFields, decoding: bool = False) -> int:
        return 0

    def channels(self, config: ConfigFields) -> int:
        """Return the number of channels of the short convolution."""
        raise NotImplementedError

    def state_flops(self, config: ConfigFields) -> int:
        """Return the floating-point operations per token: an addition to the state, a reading and, with `corrects`, one
        more reading."""
        numbers = math.prod(self.states(config).get("state", ((0,), None))[0])
        return numbers * (6 if self.corrects else 4)


@dataclass(frozen=True)
class GatedDeltaNet(Recurrent, kind="gated_delta"):
    """A matrix per head, in which each token replaces the value of its key (Gated DeltaNet, Yang et al. 2024,
    arXiv:2412.06464). The matrix decays; queries, keys and values pass through a short convolution; keys have norm 1.

    With `decay` "element", `rank` and a sigmoid gate it is Kimi Delta Attention (arXiv:2510.26692).
    """

    corrects: ClassVar[bool] = True

    n_heads: SizeOrZero = 0  # number of query and key heads; 0: the config's n_heads
    n_value_heads: SizeOrZero = 0  # number of value heads, a multiple of n_heads; 0: n_heads
    d_key: SizeOrZero = 0  # width of each query and key; 0: the config's d_head
    d_value: SizeOrZero = 0  # width of each value; 0: d_key
    d_conv: Size = 4  # number of tokens that the convolution reads, the token itself included
    decay: Literal["head", "element"] = "head"  # one decay for each value head, or for each element of a key
    negative: bool = False  # whether a token may replace a value by its opposite: the strength is up to 2, not 1
    gate: Literal["silu", "sigmoid"] = "silu"  # the activation function of the output's gate
    rank: SizeOrZero = 0  # width inside the projections to decays and gates; 0: they are one matrix each
    norm_eps: Epsilon = 1e-6  # epsilon of the norm of each head's output

    def without_repeated_sizes(self, config: ConfigFields) -> Self:
        same = {"n_heads": config.n_heads, "n_value_heads": self.n_heads or config.n_heads}
        same |= {"d_key": config.d_head, "d_value": self.d_key or config.d_head}
        repeated: dict[str, Any] = {name: 0 for name, size in same.items() if getattr(self, name) == size}
        return replace(self, **repeated)

    def counts(self, config: ConfigFields) -> tuple[int, int]:
        """Return the numbers of key heads and of value heads."""
        keys = self.n_heads or config.n_heads
        return keys, self.n_value_heads or keys

    def widths(self, config: ConfigFields) -> tuple[int, int]:
        """Return the widths of a key and of a value."""
        key = self.d_key or config.d_head
        return key, self.d_value or key

    def channels(self, config: ConfigFields) -> int:
        (keys, values), (key, value) = self.counts(config), self.widths(config)
        return 2 * keys * key + values * value

    def states(self, config: ConfigFields) -> States:
        state = self.counts(config)[1], *self.widths(config)
        return {"conv": ((self.d_conv - 1, self.channels(config)), None), "state": (state, "float32")}

    def describe(self, config: ConfigFields) -> str:
        (keys, values), (key, value) = self.counts(config), self.widths(config)
        shared = [f"{keys} for keys"] * (keys != values)
        shown = "n_heads", "n_value_heads", "d_key", "d_value"
        return self.in_words(f"{values} heads of {key} x {value}", *shared, shown=shown)

    def check(self, config: ConfigFields) -> None:
        keys, values = self.counts(config)
        if values % keys:
            raise UserError(
                f"attention.gated_delta.n_value_heads {values} is not a multiple of the {keys} key heads: change one"
            )


@dataclass(frozen=True)
class Mamba2(Recurrent, kind="mamba2"):
    """A layer whose state is a matrix for each head: each token decays it by a factor that depends on the token's step
    size, and adds an update (Mamba-2, Dao and Gu 2024, arXiv:2405.21060). Inputs pass through a short convolution; a
    gate multiplies the output."""

    n_heads: SizeOrZero = 0  # number of heads; 0: enough for 2 d_model channels
    d_head: Size = 64  # number of channels of a head
    n_groups: Size = 1  # number of groups of heads; those of a group share the projections into and out of the state
    d_state: Size = 128  # size of the state for each channel
    d_conv: Size = 4  # number of tokens that the convolution reads, the token itself included
    conv_bias: bool = True  # whether the convolution has a bias
    bias: bool = False  # whether the projections have biases
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"  # the norm of the output, in each group
    norm_eps: Epsilon = 1e-5  # epsilon of this norm
    step_min: NotNegative = 0.0  # step sizes are at least this (Nemotron-H: 0.001)
    scales: tuple[Factor, ...] = ()  # factors of the projections to gate, input, b, c and step; none: all 1 (Falcon-H1)

    def without_repeated_sizes(self, config: ConfigFields) -> Self:
        other = replace(self, n_heads=0)
        return other if other.count(config) == self.n_heads else self

    def count(self, config: ConfigFields) -> int:
        """Return the number of heads."""
        return self.n_heads or -(-2 * config.d_model // self.d_head)

    def channels(self, config: ConfigFields) -> int:
        return self.count(config) * self.d_head + 2 * self.n_groups * self.d_state

    def states(self, config: ConfigFields) -> States:
        state = self.count(config), self.d_state, self.d_head
        return {"conv": ((self.d_conv - 1, self.channels(config)), None), "state": (state, "float32")}

    def describe(self, config: ConfigFields) -> str:
        heads = f"{self.count(config)} heads of {self.d_head} x {self.d_state}"
        return self.in_words(heads, shown=("n_heads", "d_head", "d_state"))

    def check(self, config: ConfigFields) -> None:
        if len(self.scales) not in (0, 5):
            raise UserError(f"attention.mamba2.scales has {len(self.scales)} factors: give five, or none")
        if self.count(config) % self.n_groups:
            raise UserError(
                f"attention.mamba2.n_groups {self.n_groups} does not divide the {self.count(config)} heads: change one"
            )


@dataclass(frozen=True)
class ShortConvolution(Recurrent, kind="short_convolution"):
    """out(c * conv(b * x)) with b, c and x projected from the input: a causal convolution of each channel over a few
    tokens, between two gates (LFM2, Liquid AI 2025)."""

    d_conv: Size = 3  # number of tokens that the convolution reads, the token itself included
    bias: bool = False  # whether the projections and the convolution have biases

    def channels(self, config: ConfigFields) -> int:
        return config.d_model

    def states(self, config: ConfigFields) -> States:
        return {"conv": ((self.d_conv - 1, config.d_model), None)}

    def describe(self, config: ConfigFields) -> str:
        return self.in_words(f"over {self.d_conv} tokens", shown=("d_conv",))


@dataclass(frozen=True)
class AttentionAndMamba2(Attention, kind="attention_and_mamba2"):
    """Self-attention without a window and Mamba-2 side by side: both read the input of the layer, and their outputs are
    added (Falcon-H1, TII 2025). The cache of a layer has keys and values, and states."""

    attention: SelfAttention = SelfAttention()  # the attention
    mamba: Mamba2 = Mamba2()  # the layer with a state
    mamba_scale: Factor = 1.0  # multiplies the output of Mamba-2

    def without_repeated_sizes(self, config: ConfigFields) -> Self:
        inner = (part.without_repeated_sizes(config) for part in (self.attention, self.mamba))
        return replace(self, **dict(zip(("attention", "mamba"), inner)))  # type: ignore[arg-type]

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        return self.attention.entries(config)

    def heads(self, config: ConfigFields) -> HeadSizes:
        return self.attention.heads(config)

    def states(self, config: ConfigFields) -> States:
        return self.mamba.states(config)

    def key_flops(self, config: ConfigFields, decoding: bool = False) -> int:
        return self.attention.key_flops(config, decoding)

    def state_flops(self, config: ConfigFields) -> int:
        return self.mamba.state_flops(config)

    def describe(self, config: ConfigFields) -> str:
        inner = (part.describe(config) for part in (self.attention, self.mamba))
        return self.in_words(*inner, shown=("attention", "mamba"))

    def check(self, config: ConfigFields) -> None:
        self.attention.check(config)
        self.mamba.check(config)
        if self.attention.window or self.attention.shares_kv:
            raise UserError(
                "attention.attention_and_mamba2 needs attention without window and shares_kv: leave them out"
            )
