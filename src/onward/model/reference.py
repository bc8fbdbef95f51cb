"""Attention in plain PyTorch, step by step: the reference of all backends, and the steps that tracing shows.

Shapes: B batch, T tokens in this call, S keys, H heads, K key/value heads, G = H / K, E d_head, F width of a value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.model.layer_cache import Keys, to_tensor
from onward.model.mask import AttentionMask


def attention_scores(q: Tensor, k: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
    """Return the scores (B, H, T, S), before any mask, of q (B, T, H, E) and k (B, S, K, E): products times `scale`.
    `softcap` c replaces scores s by c * tanh(s / c) (Gemma 2)."""
    k = k.permute(0, 2, 3, 1)  # (B, K, E, S)
    folded = (q * scale).unflatten(2, (k.size(1), -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (B, K, G * T, E)
    scores = (folded @ k).view(q.size(0), q.size(2), q.size(1), k.size(-1))
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def masked_scores(scores: Tensor, bias: Tensor | None) -> Tensor:
    """Add a `bias`, (B or 1, 1 or H, T, S) with -inf for keys that a query does not attend to, to attention scores (B,
    H, T, S). None stands for a causal mask."""
    if bias is None:
        bias = scores.new_full(scores.shape[2:], -math.inf).triu(1)
    return scores + bias.type_as(scores)


def sink_softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the attention weights for scores (B, H, T, S): their softmax, computed in at least fp32 and rounded once.

    `sinks` (H,) are one more score per head, whose weight is dropped (GPT-OSS); None: no sinks.
    """
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.type_as(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return sink_softmax(masked_scores(attention_scores(q, k, scale=scale, softcap=softcap), bias), sinks)


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    v = v.transpose(1, 2)
    y = weights.unflatten(1, (v.size(1), -1)).flatten(2, 3) @ v  # the G heads of a group share values
    return y.view(*weights.shape[:3], v.size(-1)).transpose(1, 2)


def reference(
    q: Tensor,
    k: Keys,
    v: Keys,
    mask: AttentionMask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention in plain PyTorch, q (B, T, H, E), k (B, S, K, E), v (B, S, K, F) -> (B, T, H, F): attention
    weights (see `attention_weights`), dropout of weights at the rate `dropout`, weighted sum of the values. Supports
    every option; the faster backends must agree with this one."""
    with torch.autocast(q.device.type, enabled=False):
        k, v = to_tensor(k, q.dtype), to_tensor(v, q.dtype)
        bias = None if mask.causal_only else mask.dense(q.dtype)
        weights = attention_weights(q, k, scale=scale, softcap=softcap, bias=bias, sinks=sinks)
        return weighted_sum(F.dropout(weights, dropout), v)
