"""The choices of `DecoderConfig.block` and of its norms. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onward.base.errors import UserError
from onward.config.part_types import Attention, Block, ConfigFields, Norm, OwnMethod, at
from onward.config.ranges import Epsilon, Factor, Offset


@dataclass(frozen=True)
class LayerNorm(Norm, kind="layer"):
    """Centered and divided by the standard deviation (Ba et al. 2016). A norm with, by default, a learned weight and a
    learned bias."""

    eps: Epsilon = 1e-5  # added to the variance
    bias: bool = True  # whether a learned vector is added
    weight: bool = True  # whether to multiply by a learned vector (OLMo: no); without one, offset has no effect
    offset: Offset = 0.0  # added to the weight, which is initialized to 1 - offset (Nemotron: 1)


@dataclass(frozen=True)
class RMSNorm(Norm, kind="rms"):
    """Divided by the root of the mean square, not centered (Zhang and Sennrich 2019). A norm with, by default, a
    learned weight."""

    eps: Epsilon = 1e-5  # added to the mean square
    offset: Offset = 0.0  # added to the weight, which is initialized to 1 - offset (Gemma: 1)
    weight: bool = True  # whether to multiply by a learned vector (nanochat: no); without one, offset has no effect


@dataclass(frozen=True)
class NoNorm(Norm, kind="none"):
    """The identity. Used in place of a norm in decoders without norms."""


@dataclass(frozen=True)
class NoAttention(Attention, kind="none"):
    """No attention. Used for the layers with the block FeedForwardOnly, which have only a feed-forward."""

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        return {}

    def key_flops(self, config: ConfigFields, decoding: bool = False) -> int:
        return 0

    def check(self, config: ConfigFields) -> None:
        check_without_attention(config)


@dataclass(frozen=True)
class ScaledBlock(Block, kind=""):
    """Base class of the blocks that add branches, the outputs of attention and feed-forward, to the residual stream.

    `weights(config, layer)` of a block of your own returns the factors of the stream and the branch, first for adding
    attention, then for adding the feed-forward: ((stream, branch), (stream, branch)). The default is ((1,
    residual_scale), (1, residual_scale)).

    `layer_inputs(config)` of a block of your own returns a module from token ids (B, T) and the input x (B, T, D) of
    the first block to (L, B, T, P), the vectors of the tokens for each of L layers. The modules of the blocks read them
    from their AttentionContext as `inputs`; all layers must have a block with this method.
    """

    weights: ClassVar[OwnMethod] = None
    layer_inputs: ClassVar[OwnMethod] = None

    residual_scale: Factor = 1.0  # multiplies the output of attention and of the feed-forward (Granite)


@dataclass(frozen=True)
class PreNorm(ScaledBlock, kind="pre_norm"):
    """x + attn(norm(x)), then x + mlp(norm(x)) (GPT-2). A block that normalizes the input of attention and of the
    feed-forward."""


@dataclass(frozen=True)
class PostNorm(ScaledBlock, kind="post_norm"):
    """norm(x + attn(x)), then norm(x + mlp(x)) (GPT). A block that normalizes the residual stream after each
    addition."""


@dataclass(frozen=True)
class Sandwich(ScaledBlock, kind="sandwich"):
    """x + norm(attn(norm(x))), then x + norm(mlp(norm(x))) (Gemma 2). A block that normalizes inputs and outputs of
    attention and feed-forward, with four norms."""


@dataclass(frozen=True)
class BranchNorm(ScaledBlock, kind="branch_norm"):
    """x + norm(attn(x)), then x + norm(mlp(x)) (OLMo 2). A block that normalizes the outputs of attention and
    feed-forward."""


@dataclass(frozen=True)
class Parallel(ScaledBlock, kind="parallel"):
    """x + attn(norm(x)) + mlp(norm(x)), with two norms (GPT-NeoX). A block in which attention and feed-forward read the
    same input."""


@dataclass(frozen=True)
class SharedNorm(ScaledBlock, kind="shared_norm"):
    """x + attn(y) + mlp(y) where y = norm(x) (GPT-J, Falcon 7B, PaLM). A block in which attention and feed-forward read
    the same input, with one norm."""


@dataclass(frozen=True)
class AttentionOnly(ScaledBlock, kind="attention_only"):
    """x + attn(norm(x)), without a feed-forward. A block for studying attention in small models, and for layers with a
    single branch (Nemotron-H)."""

    additions: ClassVar[int] = 1


@dataclass(frozen=True)
class FeedForwardOnly(ScaledBlock, kind="feed_forward_only"):
    """x + mlp(norm(x)), without attention (Nemotron-H). A block for layers whose attention is `none`: they add nothing
    to the KV cache."""

    additions: ClassVar[int] = 1

    def check(self, config: ConfigFields) -> None:
        check_without_attention(config)


def check_without_attention(config: ConfigFields) -> None:
    """Raise a UserError unless exactly the layers without attention have the block FeedForwardOnly."""
    for layer in range(config.n_layers):
        block, attention = at(config.block, layer), at(config.attention, layer)
        if isinstance(block, FeedForwardOnly) != isinstance(attention, NoAttention):
            raise UserError(
                f"block is {block.kind} and attention {attention.kind} in layer {layer}: a layer without attention has "
                "both block feed_forward_only and attention none"
            )
