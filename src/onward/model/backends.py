"""Backends of attention: `attend` chooses one by shape, dtype and device.

Each takes queries q (B, T, H, E), keys k (B, S, K, E), values v (B, S, K, F) and an AttentionMask, and returns
(B, T, H, F). `reference` computes every step in plain PyTorch; the others must equal it.
Shapes: B batch, T tokens in this call, S keys, H heads, K key/value heads, G = H / K, E d_head, F width of a value.
"""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.kernels import causal
from onward.kernels.memory import Unreadable
from onward.kernels.operations import attention_kernel, is_worth
from onward.model.cache import CacheEntry, Keys, to_tensor
from onward.model.flex import flex
from onward.model.mask import AttentionMask

MAX_FOLDED = 16  # the most queries per row with which the heads of a group are folded into the query length
QUERY_BLOCK = 512  # queries per block in `sdpa_blocks`
MAX_KEYS = 3 << 17  # bytes of a row's keys and values for each query head up to which the kernel is faster than SDPA
MAX_DENSE = 1 << 21  # the largest T * S for which the bias of a packed or window layer is made as a whole


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
    """Return the attention weights (B, H, T, S) for q (B, T, H, E) and k (B, S, K, E), in plain PyTorch; the arguments
    are those of `attention_scores`, `masked_scores` and `sink_softmax`."""
    return sink_softmax(masked_scores(attention_scores(q, k, scale=scale, softcap=softcap), bias), sinks)


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """Sum values (B, S, K, F) with attention weights (B, H, T, S); return (B, T, H, F)."""
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


def sdpa(q: Tensor, k: Keys, v: Keys, mask: AttentionMask, *, scale: float, dropout: float = 0.0) -> Tensor:
    """Compute attention by PyTorch's `scaled_dot_product_attention` (SDPA), with the mask as a dense bias, or with
    `is_causal`."""
    k, v = to_tensor(k, q.dtype), to_tensor(v, q.dtype)
    return biased_sdpa(q, k, v, None if mask.causal_only else mask.dense(q.dtype), scale, dropout)


def biased_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Compute attention by PyTorch's `scaled_dot_product_attention`, with `bias` (B or 1, 1 or H, T, S) added to the
    scores, or None for the causal mask.

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
    """Compute attention by PyTorch's `scaled_dot_product_attention` in blocks of `block` queries, each over the keys
    from the first to the last that its queries see.

    The (T, S) bias of a long row of packed documents or of a window layer is never made at once. Keys and values must
    be tensors, not entries of a cache; the queries are those of the last T of the S tokens.
    """
    k, v = to_tensor(k, q.dtype), to_tensor(v, q.dtype)
    out, before = [], k.size(1) - q.size(1)
    for start in range(0, q.size(1), block):
        end = min(start + block, q.size(1))
        first, branched, s = 0, False, mask.segments
        if s is not None and mask.key_segments is not None:
            # from where the document of the block's first token begins, in any row
            first = int((mask.key_segments < s.documents[:, start, None]).sum(1).min())
            branched = bool((s.ids != s.documents)[:, start:end].any())  # the window reaches back to the document
        if mask.window and not branched:
            first = max(first, before + start - mask.window + 1)
        keys = slice(first, before + end)
        bias = mask.score_bias(q.dtype, slice(start, end), keys)
        out.append(biased_sdpa(q[:, start:end], k[:, keys], v[:, keys], bias, scale, dropout))
    return torch.cat(out, 1)


def without_gathering(
    q: Tensor, k: Keys, v: Keys, mask: AttentionMask, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor | None:
    """Compute attention by the CPU kernel, which reads keys and values where they are stored in the KV cache, without a
    copy, or in tensors. Returns (B, T, H, F), or None if the kernel does not support the arguments or is not faster;
    arguments as in `reference`."""
    if isinstance(k, CacheEntry) and isinstance(v, CacheEntry):
        return k.attend(q, v, mask, scale=scale, softcap=softcap, sinks=sinks)
    if isinstance(k, CacheEntry) or isinstance(v, CacheEntry) or not mask.plain or not mask.linear:
        return None
    size = (k[0].numel() + v[0].numel()) * k.element_size()
    kernel = attention_kernel(q, [k, v], k.size(1)) if size <= MAX_KEYS * q.size(2) else None
    if kernel is None or not is_worth("attention", q):
        return None
    positions = mask.query_positions.expand(len(q), -1)
    with suppress(Unreadable):
        vectors = q, k.contiguous(), v.contiguous(), positions
        return kernel(*vectors, window=mask.window, scale=scale, softcap=softcap, sinks=sinks, slopes=mask.slopes)
    return None


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
    """Compute attention by the fastest backend that supports the options for this shape, dtype and device: q (B, T, H,
    E), k (B, S, K, E) and v (B, S, K, F) -> (B, T, H, F). The options are those of `reference`."""
    if not dropout:
        y = without_gathering(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)
        if y is not None:
            return y
    plain = softcap is None and sinks is None
    if (
        (plain and not dropout and mask.causal_only)
        and (isinstance(k, Tensor) and isinstance(v, Tensor))
        and causal.takes_kernel(q, k, v)
    ):
        return causal.causal_attention(q, k, v, scale)
    if not plain or reference_is_faster(q, k):
        return reference(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
    long = q.size(1) * mask.key_positions.size(1) > MAX_DENSE
    if long and not mask.causal_only and not isinstance(k, CacheEntry):
        if q.device.type == "cuda" and not dropout:
            return flex(q, k, v, mask, scale=scale)
        return sdpa_blocks(q, k, v, mask, scale=scale, dropout=dropout)
    return sdpa(q, k, v, mask, scale=scale, dropout=dropout)


def reference_is_faster(q: Tensor, k: Keys) -> bool:
    """Return whether `reference`, attention in plain PyTorch, is faster than `scaled_dot_product_attention`: in bf16
    training on a CPU with at most 512 keys, where the backward of the fused kernel is slower than plain matmuls."""
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or not q.requires_grad:
        return False
    return isinstance(k, Tensor) and k.size(1) <= 512
