"""Parts that are options of attention: gates of the heads' outputs, factors of the queries that grow with the position,
and selections of tokens. Does not import torch; `model/extended.py`, `model/attends.py` and `model/indexed.py` compute
them.

Shapes: H heads, F width of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onward.base.fields import Part
from onward.config.ranges import Factor, Size


@dataclass(frozen=True)
class OutputGate(Part):
    """A gate that multiplies the outputs of the heads before the output projection: an activation function of a
    projection of the attention's input (Qiu et al. 2025, "Gated Attention for Large Language Models")."""

    per: Literal["head", "element"] = "element"  # a gate per head (H in total), or per element (H * F)
    bias: bool = False  # whether the projection has a bias
    head_bias: bool = False  # whether a learned number for each head is added to its projections (Beam)


@dataclass(frozen=True)
class SigmoidGate(OutputGate, kind="sigmoid"):
    """The gate is a sigmoid (Qwen3-Next, Trinity)."""


@dataclass(frozen=True)
class SoftplusGate(OutputGate, kind="softplus"):
    """The gate is log(1 + exp(x)) (Laguna)."""


@dataclass(frozen=True)
class QueryScale(Part):
    """A factor of the queries that grows with their position p, so that attention over a long text is as sharp as over
    a short one (Nakanishi 2025, "Scalable-Softmax Is Superior for Attention")."""


@dataclass(frozen=True)
class LogScale(QueryScale, kind="log"):
    """The factor 1 + weight * ln(1 + floor((p + offset) / original)), which is 1 within the original context (Llama 4,
    Ministral 3)."""

    weight: Factor = 0.1  # multiplies the logarithm
    original: Size = 8192  # the context length in training
    offset: Literal[0, 1] = 0  # added to the position, which begins at 0


@dataclass(frozen=True)
class PowerScale(QueryScale, kind="power"):
    """The factor (1 + (p + 1) / original) ** exponent."""

    exponent: Factor = 0.1  # how fast the factor grows
    original: Size = 2048  # number of tokens after which the factor is 2 ** exponent


@dataclass(frozen=True)
class Indexing(Part):
    """How a token selects, by content, the earlier tokens that it attends to."""


@dataclass(frozen=True)
class Indexer(Indexing, kind="own"):
    """The `top_k` tokens with the highest scores: sums over the heads of w relu(q k / sqrt(d_head)) / sqrt(n_heads),
    with q, k and w projected from the tokens (DeepSeek Sparse Attention, DeepSeek-AI 2025). Among tokens with equal
    scores, any may be selected.

    Its weights are not trained, because the selection has no gradient.
    """

    top_k: Size = 2048  # maximum number of tokens that a token attends to
    n_heads: Size = 64  # number of heads of queries; all use the same keys
    d_head: Size = 128  # width of its queries and keys, of which the first d_rope elements are rotated


@dataclass(frozen=True)
class SharedIndexer(Indexing, kind="shared"):
    """The same tokens as in the nearest earlier layer with an indexer of its own (GLM-5)."""
