"""The choices of `DecoderConfig.block` and of its norms. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onward.config.part_types import Block, Norm
from onward.config.ranges import Epsilon, Factor, Offset


@dataclass(frozen=True)
class LayerNorm(Norm, kind="layer"):
    """Centered and divided by the standard deviation (Ba et al. 2016). A norm with a learned weight and, with `bias`, a
    learned bias."""

    eps: Epsilon = 1e-5  # added to the variance
    bias: bool = True  # whether a learned vector is added
    weight: bool = True  # whether a learned vector multiplies (OLMo: no); without one, offset has no effect
    offset: Offset = 0.0  # added to the weight, which is initialized to 1 - offset (Nemotron: 1)


@dataclass(frozen=True)
class RMSNorm(Norm, kind="rms"):
    """Divided by the root of the mean square, not centered (Zhang and Sennrich 2019). A norm with a learned weight."""

    eps: Epsilon = 1e-5  # added to the mean square
    offset: Offset = 0.0  # added to the weight, which is initialized to 1 - offset (Gemma: 1)
    weight: bool = True  # whether a learned vector multiplies (nanochat: no); without one, offset has no effect


@dataclass(frozen=True)
class NoNorm(Norm, kind="none"):
    """The identity. Used in place of a norm in decoders without norms."""


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
