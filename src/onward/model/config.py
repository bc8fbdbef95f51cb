"""DecoderConfig: a decoder as a value. Sizes, and one part for every choice. Does not import torch.

A part is a frozen dataclass with its own fields; `build(config, layer)` makes its module (the modules are in the
files beside this one). Any part may be a tuple, which then repeats over the layers:
`attention=(SelfAttention(window=128), SelfAttention())` alternates local and global layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from onward.errors import UserError
from onward.model.slots import Attention, Block, FeedForward, Norm, Position, at

if TYPE_CHECKING:
    from torch import Tensor, nn

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
# ---------------------------------------------------------------- positions


@dataclass(frozen=True)
class Learned(Position, kind="learned"):
    """A trained vector per position (GPT)."""

    added: ClassVar[bool] = True
    offset: int = 0  # position p uses row p + offset (OPT: 2)

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.positions import LearnedPosition

        return LearnedPosition(config.context_length, config.d_model, self.offset)

    def limit(self, config: DecoderConfig) -> float:
        return config.context_length

    def check(self, config: DecoderConfig) -> None:
        if self.offset < 0:
            raise UserError(f"position.learned.offset is {self.offset}: it must be at least 0")


@dataclass(frozen=True)
class Sinusoidal(Position, kind="sinusoidal"):
    """Fixed sines and cosines of each position (Vaswani et al. 2017, section 3.5)."""

    added: ClassVar[bool] = True
    theta: float = 10_000.0  # the longest wavelength is 2 pi theta

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.positions import SinusoidalPosition

        return SinusoidalPosition(config.d_model, self.theta)

    def check(self, config: DecoderConfig) -> None:
        if config.d_model % 2:
            raise UserError(f"d_model is {config.d_model}: sinusoidal positions need an even width")


@dataclass(frozen=True)
class Rotary(Position, kind="rotary"):
    """Queries and keys turned by an angle that grows with the position (RoFormer, Su et al. 2021), halves paired."""

    theta: float = 10_000.0  # base of the angles; larger turns slower
    fraction: float = 1.0  # share of each head that turns

    def rotating(self, width: int) -> int:
        """How many of a head's `width` numbers turn."""
        return int(width * self.fraction)

    def rotation(self, width: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        from onward.model.positions import rotation

        return rotation(self.theta, self.rotating(width), positions)

    def check(self, config: DecoderConfig) -> None:
        if not 0 < self.fraction <= 1:
            raise UserError(f"position.rotary.fraction is {self.fraction}: it is a share, above 0 and at most 1")
        if (width := self.rotating(config.d_head)) % 2 or not width:
            raise UserError(f"{width} of {config.d_head} numbers in a head rotate: choose an even number (d_head)")


@dataclass(frozen=True)
class Alibi(Position, kind="alibi"):
    """Scores lowered in proportion to the distance, by a slope per head (Press et al. 2021)."""

    def slopes(self, config: DecoderConfig) -> Tensor:
        from onward.model.positions import alibi_slopes

        return alibi_slopes(config.n_heads)


@dataclass(frozen=True)
class NoPosition(Position, kind="none"):
    """No position at all: only the causal mask tells the order (NoPE, Kazemnejad et al. 2023)."""


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class SelfAttention(Attention, kind="self"):
    """Softmax attention; n_kv_heads makes it multi-head, grouped or multi-query."""

    window: int = 0  # how many tokens back a token sees, itself included; 0: all
    scale: float | None = None  # of the scores; none: d_head ** -0.5
    score_cap: float | None = None  # scores s become cap * tanh(s / cap) (Gemma 2)
    sinks: bool = False  # a learned score per head that takes part in the softmax and adds nothing (GPT-OSS)
    qk_norm: Literal["none", "head", "width"] = "none"  # normalise q and k, per head or over all heads together
    bias: bool = False  # of the q, k and v projections
    out_bias: bool = False  # of the output projection
    out: bool = True  # whether there is an output projection

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.attention import SelfAttentionModule

        return SelfAttentionModule(self, config, layer)

    def entries(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("k", "v"), (config.n_kv_heads, config.d_head))

    def check(self, config: DecoderConfig) -> None:
        if self.window < 0:
            raise UserError(f"attention.self.window is {self.window}: it must be positive, or 0 to see all")
        if self.score_cap is not None and self.score_cap <= 0:
            raise UserError(f"attention.self.score_cap is {self.score_cap}: it must be positive, or none")


# ---------------------------------------------------------------- feed-forward


@dataclass(frozen=True)
class Plain(FeedForward, kind="plain"):
    """down(act(up(x)))."""

    act: Activation = "gelu"  # the non-linearity
    bias: bool = False  # of both projections

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.feedforward import PlainModule

        return PlainModule(config.d_model, config.d_ff, self.act, self.bias, config.dropout)


@dataclass(frozen=True)
class Gated(FeedForward, kind="gated"):
    """down(act(gate(x)) * up(x)) (GLU variants, Shazeer 2020); SwiGLU with silu."""

    act: Activation = "silu"  # the non-linearity
    bias: bool = False  # of the three projections

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.feedforward import GatedModule

        return GatedModule(config.d_model, config.d_ff, self.act, self.bias, config.dropout)


@dataclass(frozen=True)
class Experts(FeedForward, kind="experts"):
    """Many gated feed-forwards of which each token visits a few (mixture of experts; Mixtral, DeepSeek-MoE)."""

    count: int = 8  # how many experts there are
    active: int = 2  # how many each token visits
    d_ff: int = 0  # width inside one expert; 0: the config's d_ff
    shared: int = 0  # experts that every token visits, as one feed-forward of shared * d_ff
    renormalize: bool = True  # the weights of the visited experts sum to 1
    act: Activation = "silu"  # the non-linearity
    compute: Literal["auto", "loop", "grouped"] = "auto"  # expert by expert, in grouped products, or as timed

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.experts import ExpertsModule

        return ExpertsModule(self, config)

    def check(self, config: DecoderConfig) -> None:
        if not 1 <= self.active <= self.count:
            raise UserError(f"mlp.experts.active is {self.active}: a token visits between 1 and count ({self.count})")
        if self.shared < 0 or self.d_ff < 0:
            raise UserError(f"mlp.experts has shared {self.shared} and d_ff {self.d_ff}: neither can be negative")


# ---------------------------------------------------------------- norms


@dataclass(frozen=True)
class LayerNorm(Norm, kind="layer"):
    """Centred, then brought to unit variance (Ba et al. 2016)."""

    eps: float = 1e-5  # added to the variance
    bias: bool = True  # whether a trained vector is added

    def build(self, config: DecoderConfig, layer: int, width: int = 0) -> nn.Module:
        from onward.model.norms import LayerNormModule

        return LayerNormModule(width or config.d_model, self.eps, bias=self.bias)


@dataclass(frozen=True)
class RMSNorm(Norm, kind="rms"):
    """Divided by the root of the mean square, not centred (Zhang and Sennrich 2019)."""

    eps: float = 1e-5  # added to the mean square
    offset: float = 0.0  # added to the weight, which then starts at 1 - offset (Gemma: 1)

    def build(self, config: DecoderConfig, layer: int, width: int = 0) -> nn.Module:
        from onward.model.norms import RMSNormModule

        return RMSNormModule(width or config.d_model, self.eps, self.offset)


@dataclass(frozen=True)
class NoNorm(Norm, kind="none"):
    """The vector as it is."""

    def build(self, config: DecoderConfig, layer: int, width: int = 0) -> nn.Module:
        from torch import nn

        return nn.Identity()


# ---------------------------------------------------------------- blocks


@dataclass(frozen=True)
class PreNorm(Block, kind="pre_norm"):
    """x + attn(norm(x)), then x + mlp(norm(x)) (GPT-2)."""

    residual_scale: float = 1.0  # both additions are multiplied by this (Granite)

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.blocks import PreNormBlock, ScaledBlock

        if self.residual_scale == 1.0:
            return PreNormBlock(config, layer)
        return ScaledBlock(config, layer, self.residual_scale)


@dataclass(frozen=True)
class PostNorm(Block, kind="post_norm"):
    """norm(x + attn(x)), then norm(x + mlp(x)) (GPT)."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.blocks import PostNormBlock

        return PostNormBlock(config, layer)


@dataclass(frozen=True)
class Sandwich(Block, kind="sandwich"):
    """x + norm(attn(norm(x))), then x + norm(mlp(norm(x))) (Gemma 2)."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.blocks import SandwichBlock

        return SandwichBlock(config, layer)


@dataclass(frozen=True)
class Parallel(Block, kind="parallel"):
    """x + attn(norm(x)) + mlp(norm(x)), with two norms (GPT-NeoX)."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.blocks import ParallelBlock

        return ParallelBlock(config, layer)


@dataclass(frozen=True)
class SharedNorm(Block, kind="shared_norm"):
    """x + attn(y) + mlp(y) where y = norm(x) (GPT-J, Falcon 7B, PaLM)."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.blocks import SharedNormBlock

        return SharedNormBlock(config, layer)


@dataclass(frozen=True)
class AttentionOnly(Block, kind="attention_only"):
    """x + attn(norm(x)), and nothing else."""

    additions: ClassVar[int] = 1

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.blocks import AttentionOnlyBlock

        return AttentionOnlyBlock(config, layer)


# ---------------------------------------------------------------- the decoder


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only Transformer as a value.

    The sizes that are 0 by default are worked out from the others when the config is made. A UserError says which
    sizes contradict each other.
    """

    vocab_size: int  # how many token ids there are
    d_model: int  # width of the residual stream
    n_layers: int  # number of blocks
    n_heads: int  # number of query heads
    n_kv_heads: int = 0  # number of key/value heads: 1 is multi-query; 0: n_heads
    d_head: int = 0  # width of a head; 0: d_model / n_heads
    d_ff: int = 0  # width inside the feed-forward; 0: 4 d_model, or 8/3 d_model up to a multiple of 32 where gated
    context_length: int = 1024  # the most tokens it is made for
    position: Position | tuple[Position, ...] = Rotary()  # how order enters
    attention: Attention | tuple[Attention, ...] = SelfAttention()  # how a token reads from those before it
    mlp: FeedForward | tuple[FeedForward, ...] = Gated()  # what happens to each token by itself
    norm: Norm | tuple[Norm, ...] = RMSNorm()  # how vectors are normalised
    block: Block | tuple[Block, ...] = PreNorm()  # the arithmetic of the residual stream
    final_norm: Norm | None = None  # the norm before the head; none: as in the blocks
    tied: bool = False  # the head uses the embedding's weights
    head_bias: bool = False  # whether the head has a bias
    embed_scale: float = 1.0  # embeddings are multiplied by this
    logit_scale: float = 1.0  # logits are multiplied by this
    logit_cap: float | None = None  # logits z become cap * tanh(z / cap)
    dropout: float = 0.0  # share dropped in training, of embeddings, attention weights and block outputs

    def __post_init__(self) -> None:
        def derive(name: str, value: Callable[[], int]) -> None:
            object.__setattr__(self, name, getattr(self, name) or value())

        slots = "position", "attention", "mlp", "norm", "block"
        for name in slots:
            if getattr(self, name) == ():
                raise UserError(f"{name} names no part: give at least one")
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "context_length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("n_kv_heads", "d_head", "d_ff"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be positive, or 0 to be worked out")
        if not self.d_head and self.d_model % self.n_heads:
            raise UserError(
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}: change one of them or give d_head"
            )
        derive("n_kv_heads", lambda: self.n_heads)
        derive("d_head", lambda: self.d_model // self.n_heads)
        gated = not isinstance(at(self.mlp, 0), Plain)
        derive("d_ff", lambda: -(-8 * self.d_model // 96) * 32 if gated else 4 * self.d_model)
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}: change one")
        first = at(self.position, 0)
        if any(at(self.position, i).added and at(self.position, i) != first for i in range(self.n_layers)):
            raise UserError("position: one that is added to the embeddings must be that of the first layer")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}: it is a share, at least 0 and below 1")
        for name in slots:
            parts = getattr(self, name)
            for part in parts if isinstance(parts, tuple) else (parts,):
                part.check(self)
