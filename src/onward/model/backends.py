"""Backends of attention: `attend` chooses one by shape, dtype and device.

Each takes queries q (B, T, H, E), keys k (B, S, K, E), values v (B, S, K, F) and an AttentionMask, and returns
(B, T, H, F). `reference` computes every step in plain PyTorch; the others must equal it.
Shapes: B batch, T tokens in this call, S keys, H heads, K key/value heads, G = H / K, E d_head, F width of a value.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.model.cache import CacheEntry
from onward.model.mask import AttentionMask, visible

MAX_FOLDED = 16  # the most queries per row with which the heads of a group are folded into the query length
QUERY_BLOCK = 512  # queries per block in `sdpa_blocks`
MAX_DENSE = 1 << 21  # the largest T * S for which the bias of a packed or window layer is made as a whole
Keys = Tensor | CacheEntry  # keys (B, S, K, E) or values (B, S, K, F): a tensor, or the entry of a cache


def to_tensor(keys: Keys, dtype: torch.dtype) -> Tensor:
    """Keys or values (B, S, ...) as a tensor of this dtype; entries of a cache are gathered and dequantized."""
    return keys.read(dtype) if isinstance(keys, CacheEntry) else keys


def attention_scores(q: Tensor, k: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
    """The scores (B, H, T, S), before any mask, of q (B, T, H, E) and k (B, S, K, E).

    `softcap` c replaces scores s by c * tanh(s / c) (Gemma 2).
    """
    k = k.permute(0, 2, 3, 1)  # (B, K, E, S)
    folded = (q * scale).unflatten(2, (k.size(1), -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (B, K, G * T, E)
    scores = (folded @ k).view(q.size(0), q.size(2), q.size(1), k.size(-1))
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def masked_scores(scores: Tensor, bias: Tensor | None) -> Tensor:
    """Scores (B, H, T, S) plus a bias (B or 1, 1 or H, T, S), -inf where a key is not seen; None: the causal mask."""
    if bias is None:
        bias = scores.new_full(scores.shape[2:], -math.inf).triu(1)
    return scores + bias.type_as(scores)


def sink_softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores (B, H, T, S), computed in at least fp32 and rounded once.

    `sinks` (H,) are one more score per head, whose weight is dropped (GPT-OSS).
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
    """The attention weights (B, H, T, S) for q (B, T, H, E) and k (B, S, K, E), in plain PyTorch; the arguments are
    those of `attention_scores`, `masked_scores` and `sink_softmax`."""
    return sink_softmax(masked_scores(attention_scores(q, k, scale=scale, softcap=softcap), bias), sinks)


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """Values (B, S, K, F) summed with attention weights (B, H, T, S): (B, T, H, F)."""
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
    """Attention in plain PyTorch: weights, dropout, weighted sum of the values. Supports every option."""
    with torch.autocast(q.device.type, enabled=False):
        k, v = to_tensor(k, q.dtype), to_tensor(v, q.dtype)
        bias = None if mask.causal_only else mask.dense(q.dtype)
        weights = attention_weights(q, k, scale=scale, softcap=softcap, bias=bias, sinks=sinks)
        return weighted_sum(F.dropout(weights, dropout), v)


def sdpa(q: Tensor, k: Keys, v: Keys, mask: AttentionMask, *, scale: float, dropout: float = 0.0) -> Tensor:
    """torch's scaled_dot_product_attention, with a dense bias, or with `is_causal`."""
    k, v = to_tensor(k, q.dtype), to_tensor(v, q.dtype)
    return biased_sdpa(q, k, v, None if mask.causal_only else mask.dense(q.dtype), scale, dropout)


def biased_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float) -> Tensor:
    """SDPA with a bias (B or 1, 1 or H, T, S), or None for the causal mask.

    Few queries with grouped heads are folded, the G heads of a group into the query length: in bf16 on a CPU this is
    five to eight times as fast as `enable_gqa`, and on CUDA it keeps a masked call off the math kernel.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    heads, kv_heads = q.size(1), k.size(1)
    if heads == kv_heads or bias is None or q.size(2) > MAX_FOLDED:
        causal = bias is None
        y = F.scaled_dot_product_attention(q, k, v, bias, dropout, causal, scale=scale, enable_gqa=heads != kv_heads)
        return y.transpose(1, 2)
    rows, _, tokens, _ = q.shape
    q = q.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # (B, K, G * T, E)
    if tokens > 1 or bias.size(1) > 1:
        bias = bias.expand(-1, heads, -1, -1).unflatten(1, (kv_heads, -1)).flatten(2, 3)
    y = F.scaled_dot_product_attention(q, k, v, bias, dropout, scale=scale)
    return y.view(rows, heads, tokens, -1).transpose(1, 2)


def sdpa_blocks(
    q: Tensor, k: Keys, v: Keys, mask: AttentionMask, *, scale: float, dropout: float = 0.0, block: int = QUERY_BLOCK
) -> Tensor:
    """SDPA in blocks of `block` queries, each over the keys from the first to the last that its queries see.

    A long row of packed documents or of a window layer never needs its whole (T, S) bias. Not for entries of a cache.
    """
    k, v = to_tensor(k, q.dtype), to_tensor(v, q.dtype)
    out = []
    for start in range(0, q.size(1), block):
        end = min(start + block, q.size(1))
        first = max(0, start - mask.window + 1) if mask.window else 0
        if mask.segments is not None:  # where the document of the block's first token begins, the least over the rows
            first = max(first, int((mask.segments[:, : start + 1] < mask.segments[:, start, None]).sum(1).min()))
        bias = mask.score_bias(q.dtype, slice(start, end), slice(first, end))
        out.append(biased_sdpa(q[:, start:end], k[:, first:end], v[:, first:end], bias, scale, dropout))
    return torch.cat(out, 1)


def flex(q: Tensor, k: Keys, v: Keys, mask: AttentionMask, *, scale: float) -> Tensor:
    """FlexAttention with the mask and the bias as functions of the indices of a query and a key: no bias (T, S)."""
    k, v = (to_tensor(t, q.dtype).transpose(1, 2) for t in (k, v))
    return flex_over(q, k, v, mask, mask.key_positions.expand(q.size(0), -1), scale)


def paged(q: Tensor, k: CacheEntry, v: CacheEntry, mask: AttentionMask, *, scale: float) -> Tensor:
    """FlexAttention over the blocks of a paged cache in place, without gathering them for each row.

    Every row attends to the whole pool of blocks, in which slots of other rows have position -1, which no query sees.
    `attend` never chooses it: NaN in the block of one row would reach the others.
    """
    pool = [t.cache.entries[t.name].flatten(0, 1).transpose(0, 1)[None] for t in (k, v)]  # (1, K, blocks * size, E)
    keys, values = (t.expand(q.size(0), -1, -1, -1).to(q.dtype) for t in pool)
    return flex_over(q, keys, values, mask, k.pool_positions(), scale)


def flex_over(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, key_positions: Tensor, scale: float) -> Tensor:
    """FlexAttention for q (B, T, H, E) over k, v (B, K, S, E) whose keys are at key_positions (B, S)."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, tokens = q.shape[:2]
    query_positions, segments = mask.query_positions.expand(rows, -1), mask.segments
    slopes, bias_of = mask.slopes, mask.bias_of
    compute_dtype = torch.promote_types(q.dtype, torch.float32)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        sees = visible(query_positions[b, i], key_positions[b, j], mask.window)
        return sees if segments is None else sees & (segments[b, i] == segments[b, j])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert slopes is not None
        assert bias_of is not None
        query, key = query_positions[b, i].to(compute_dtype), key_positions[b, j].to(compute_dtype)
        return score + bias_of(slopes[h], query, key).to(score.dtype)

    blocks = create_block_mask(mask_mod, rows, None, tokens, k.size(2), device=q.device)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": q.size(2) != k.size(1), "block_mask": blocks}
    kernel = flex_kernel(q.device.type)
    return kernel(q.transpose(1, 2), k, v, score_mod=None if slopes is None else score_mod, **options).transpose(1, 2)


@cache
def flex_kernel(device: str) -> Any:
    """FlexAttention; compiled on CUDA, where that gives a fused kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


def attend(
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
    """Attention by the fastest backend that supports the options, for this shape, dtype and device."""
    if isinstance(k, CacheEntry) and isinstance(v, CacheEntry):
        y = k.attend(q, v, mask, scale=scale, softcap=softcap, sinks=sinks)
        if y is not None:
            return y
    if softcap is not None or sinks is not None or reference_is_faster(q, k):
        return reference(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
    long = q.size(1) * mask.key_positions.size(1) > MAX_DENSE
    if long and not mask.causal_only and not isinstance(k, CacheEntry):
        if q.device.type == "cuda" and not dropout:
            return flex(q, k, v, mask, scale=scale)
        return sdpa_blocks(q, k, v, mask, scale=scale, dropout=dropout)
    return sdpa(q, k, v, mask, scale=scale, dropout=dropout)


def reference_is_faster(q: Tensor, k: Keys) -> bool:
    """Whether `reference` beats SDPA: in bf16 training on a CPU with at most 512 keys, where the backward of the fused
    kernel is slower than plain matmuls."""
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or not q.requires_grad:
        return False
    return isinstance(k, Tensor) and k.size(1) <= 512
