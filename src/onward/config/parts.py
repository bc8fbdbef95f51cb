"""Parts: the choices for each part of a DecoderConfig. Does not import torch.

A part is a frozen dataclass with its own fields. `model/build.py` says which module each part builds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.base.fields import text
from onward.config.part_types import (
    Attention,
    Base,
    Block,
    ConfigFields,
    Epsilon,
    Factor,
    FeedForward,
    Norm,
    Offset,
    OwnMethod,
    Position,
    Size,
    SizeOrZero,
    each,
)
from onward.config.routing import Routing, SoftmaxRouting
from onward.config.scaling import Scaling

ActivationName = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu"]

# ---------------------------------------------------------------- positions


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
    theta: Base = 10_000.0  # the longest wavelength is 2 pi theta

    def check(self, config: ConfigFields) -> None:
        if config.d_model % 2:
            raise UserError(f"d_model is {config.d_model}: sinusoidal positions need an even width")


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
    """Scores lowered in proportion to the distance of query and key, by a slope per head (Press et al. 2021)."""

    steepness: Annotated[float, Range(1e-6, 100)] = 8.0  # the last head's slope is 2 ** -steepness


@dataclass(frozen=True)
class NoPosition(Position, kind="none"):
    """No positions: the order enters through the causal mask alone (NoPE, Kazemnejad et al. 2023)."""


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class SelfAttention(Attention, kind="self"):
    """Softmax attention: multi-head, grouped-query or multi-query, depending on n_kv_heads."""

    window: SizeOrZero = 0  # number of tokens that a token attends to, itself included; 0: all
    scale: Factor | None = None  # multiplies the scores; none: d_head ** -0.5
    attn_softcap: Factor | None = None  # scores s become cap * tanh(s / cap) (Gemma 2)
    sinks: bool = False  # add a learned score per head to the softmax, with no value (GPT-OSS)
    qk_norm: Literal["none", "head", "heads", "width"] = "none"  # q/k norm: shared by heads, one per head, full width
    clip: Factor | None = None  # clamp queries, keys and values to -clip ... clip (MPT)
    bias: bool = False  # whether the q, k and v projections have biases
    out_bias: bool = False  # whether the output projection has a bias
    out: bool = True  # whether the layer has an output projection

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("k", "v"), (config.n_kv_heads, config.d_head))

    def describe(self, config: ConfigFields) -> str:
        shared = [f"{config.n_kv_heads} for keys and values"] * (config.n_kv_heads != config.n_heads)
        return self.in_words(f"{config.n_heads} heads of {config.d_head}", *shared)

    def check(self, config: ConfigFields) -> None:
        if not self.out and (heads := config.n_heads * config.d_head) != config.d_model:
            raise UserError(
                f"attention.self.out is false, and the heads together are {heads} wide where d_model is "
                f"{config.d_model}: keep the projection, or set d_head to d_model / n_heads"
            )


@dataclass(frozen=True)
class LatentAttention(Attention, kind="latent"):
    """Keys and values are projections of one latent vector per token; the cache keeps this vector and a rotary key
    shared by all heads (multi-head latent attention, DeepSeek-V2, DeepSeek-AI 2024, section 2.1)."""

    d_latent: Size = 512  # width of the latent of keys and values
    d_query_latent: SizeOrZero = 0  # width of the latent of queries; 0: queries are projected from x
    d_nope: Size = 128  # elements of each query and key that are not rotated
    d_rope: Size = 64  # rotated elements of each query and key; all heads share the rotated elements of the key
    d_value: Size = 128  # width of each head's value
    scale: Factor | None = None  # multiplies the scores; none: (d_nope + d_rope) ** -0.5
    bias: bool = False  # whether the projections to the latents and the output projection have biases
    norm_eps: Epsilon = 1e-6  # epsilon of the norms of the latents

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        return {"latent": (1, self.d_latent), "rotary": (1, self.d_rope)}  # keys of one head, shared by all

    def describe(self, config: ConfigFields) -> str:
        heads = f"{config.n_heads} heads of {self.d_nope} + {self.d_rope}"
        return self.in_words(heads, f"latents of {self.d_latent}", shown=("d_latent", "d_nope", "d_rope"))

    def rope_width(self, config: ConfigFields) -> int:
        return self.d_rope

    def key_flops(self, config: ConfigFields, decoding: bool = False) -> int:
        if decoding:  # latents serve as keys and values
            return 2 * config.n_heads * (2 * self.d_latent + self.d_rope)
        return 2 * config.n_heads * (self.d_nope + self.d_rope + self.d_value)


# ---------------------------------------------------------------- feed-forward


@dataclass(frozen=True)
class Plain(FeedForward, kind="plain"):
    """down(act(up(x))). The feed-forward of the original Transformer: `up` projects from d_model to d_ff, `act` is the
    activation function, `down` projects back."""

    act: ActivationName = "gelu"  # the activation function
    bias: bool = False  # whether both projections have biases

    def describe(self, config: ConfigFields) -> str:
        return self.in_words(f"width {config.d_ff:,}", self.act, shown=("act",))


@dataclass(frozen=True)
class Gated(FeedForward, kind="gated"):
    """down(act(gate(x)) * up(x)) (GLU variants, Shazeer 2020); SwiGLU with silu. A feed-forward whose projections
    `gate` and `up` go from d_model to d_ff, and `down` back."""

    act: ActivationName = "silu"  # the activation function
    bias: bool = False  # whether the three projections have biases

    def describe(self, config: ConfigFields) -> str:
        return self.in_words(f"width {config.d_ff:,}", self.act, shown=("act",))


@dataclass(frozen=True)
class Experts(FeedForward, kind="experts"):
    """Mixture of experts: each token uses a few of many gated feed-forwards (Mixtral, DeepSeek-MoE).

    `combine(act, gate, up)` of a part of your own returns the input of an expert's down projection, from the activation
    function `act` and the outputs of the gate and up projections; without it, act(gate) * up.
    """

    combine: ClassVar[OwnMethod] = None

    count: Size = 8  # number of experts
    top_k: Size = 2  # number of experts per token
    d_ff: SizeOrZero = 0  # width inside one expert; 0: the config's d_ff
    router: Routing = SoftmaxRouting()  # how a token's experts are selected
    d_shared: SizeOrZero = 0  # width of a shared feed-forward, which every token also uses; 0: no shared feed-forward
    shared_gate: bool = False  # multiply the output of the shared feed-forward by a learned gate per token (Qwen2-MoE)
    act: ActivationName = "silu"  # the activation function
    bias: bool = False  # whether the three projections of each expert have biases
    backend: Literal["auto", "loop", "grouped"] = "auto"  # one matmul per expert, or grouped matmuls; auto: the fastest

    def describe(self, config: ConfigFields) -> str:
        sizes = [f"{self.count} of width {self.d_ff or config.d_ff:,}, {self.top_k} per token"]
        sizes += [f"one more of width {self.d_shared:,} for all tokens"] * (self.d_shared > 0)
        return self.in_words(*sizes, self.act, shown=("count", "d_ff", "top_k", "d_shared", "act"))

    def check(self, config: ConfigFields) -> None:
        where = f"mlp.{self.kind}"
        if self.top_k > self.count:
            raise UserError(f"{where}.top_k is {self.top_k}: it must be at most count ({self.count})")
        r = self.router
        if not 1 <= r.top_k_groups <= r.n_groups or self.count % r.n_groups:
            raise UserError(
                f"{where}.router selects {r.top_k_groups} of {r.n_groups} groups of {self.count} experts: count must "
                "be a multiple of n_groups, and top_k_groups between 1 and n_groups"
            )
        if self.top_k > self.count // r.n_groups * r.top_k_groups:
            raise UserError(f"{where}.top_k is {self.top_k}, more than the experts in the selected groups: lower it")


# ---------------------------------------------------------------- norms


@dataclass(frozen=True)
class LayerNorm(Norm, kind="layer"):
    """Centered and divided by the standard deviation (Ba et al. 2016). A norm with a learned weight and, with `bias`, a
    learned bias."""

    eps: Epsilon = 1e-5  # added to the variance
    bias: bool = True  # whether a learned vector is added


@dataclass(frozen=True)
class RMSNorm(Norm, kind="rms"):
    """Divided by the root of the mean square, not centered (Zhang and Sennrich 2019). A norm with a learned weight."""

    eps: Epsilon = 1e-5  # added to the mean square
    offset: Offset = 0.0  # added to the weight, which is initialized to 1 - offset (Gemma: 1)


@dataclass(frozen=True)
class NoNorm(Norm, kind="none"):
    """The identity. Used in place of a norm in decoders without norms."""


# ---------------------------------------------------------------- blocks


@dataclass(frozen=True)
class PreNorm(Block, kind="pre_norm"):
    """x + attn(norm(x)), then x + mlp(norm(x)) (GPT-2). A block that normalizes the input of attention and of the
    feed-forward."""

    residual_scale: Factor = 1.0  # multiplies the output of attention and of the feed-forward (Granite)


@dataclass(frozen=True)
class PostNorm(Block, kind="post_norm"):
    """norm(x + attn(x)), then norm(x + mlp(x)) (GPT). A block that normalizes the residual stream after each
    addition."""


@dataclass(frozen=True)
class Sandwich(Block, kind="sandwich"):
    """x + norm(attn(norm(x))), then x + norm(mlp(norm(x))) (Gemma 2). A block that normalizes inputs and outputs of
    attention and feed-forward, with four norms."""


@dataclass(frozen=True)
class BranchNorm(Block, kind="branch_norm"):
    """x + norm(attn(x)), then x + norm(mlp(x)) (OLMo 2). A block that normalizes the outputs of attention and
    feed-forward."""


@dataclass(frozen=True)
class Parallel(Block, kind="parallel"):
    """x + attn(norm(x)) + mlp(norm(x)), with two norms (GPT-NeoX). A block in which attention and feed-forward read the
    same input."""


@dataclass(frozen=True)
class SharedNorm(Block, kind="shared_norm"):
    """x + attn(y) + mlp(y) where y = norm(x) (GPT-J, Falcon 7B, PaLM). A block in which attention and feed-forward read
    the same input, with one norm."""


@dataclass(frozen=True)
class AttentionOnly(Block, kind="attention_only"):
    """x + attn(norm(x)), without a feed-forward. A block for small models in which attention is studied."""

    additions: ClassVar[int] = 1
