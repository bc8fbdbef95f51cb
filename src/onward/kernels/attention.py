"""Attention that reads the visible positions of a cache in its memory, without gathering keys and values.

In a contiguous cache, position p of row b is in slot p % S of row b. In a paged cache, whose blocks have S slots, it is
in slot p % S of block table[b, p // S].
Shapes: B rows, T tokens in a call, S slots, P blocks of a row, H heads, K key/value heads, E d_head, F d_value; R last
elements of the keys that are in an entry of their own, the tails.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onward.kernels.available import unavailable
from onward.kernels.memory import Unreadable, address, buffer, rows_address
from onward.kernels.rules import DTYPES, emitter, takes_kernels

MIN_WORK = 1 << 20  # elements of the queries times slots from which compiling the kernel pays


def plain_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor | None = None,
    tails: Tensor | None = None,
    *,
    window: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Compute attention in plain PyTorch with queries q (B, T, H, E) at positions (B, T) to the entries of a KV cache:
    keys (B, S, K, E) and values (B, S, K, F) or, with a block table (B, P), (blocks, S, K, E) and (blocks, S, K, F).
    With `tails`, (B, S, K, R) or (blocks, S, K, R), the keys are E - R wide, followed by the tails. Returns (B, T, H,
    F).

    A query sees the positions up to its own, the last `window` of them (0: all). `scale` multiplies the scores;
    `softcap` c replaces scores s by c * tanh(s / c); `sinks` (H,) are one more score per head, without a value;
    `slopes` (H,) times the distance of query and key are subtracted from the scores (ALiBi).
    """
    keys = keys if tails is None else torch.cat([keys, tails], -1)
    if table is None:
        key_positions = positions[:, -1:] - (positions[:, -1:] - torch.arange(keys.size(1))) % keys.size(1)
    else:
        keys, values = (entry[table].flatten(1, 2) for entry in (keys, values))
        key_positions = torch.arange(keys.size(1))[None]
    distance = positions[:, :, None] - key_positions[:, None]  # (B, T, S)
    seen = (distance >= 0) & (key_positions >= 0)[:, None] & (distance < (window or math.inf))
    keys, values = (entry.repeat_interleave(q.size(2) // entry.size(2), 2).float() for entry in (keys, values))
    scores = torch.einsum("bthe,bshe->bhts", q.float(), keys) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes.float()[:, None, None] * distance[:, None]
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : keys.size(1)]
    return torch.einsum("bhts,bshf->bthf", weights, values).to(q.dtype)


def takes_kernel(q: Tensor, keys: Tensor, values: Tensor, slots: int) -> bool:
    """Return whether the CPU kernel can compute attention of queries q (B, T, H, E), each of which sees up to `slots`
    positions, to these keys and values of a KV cache, contiguous or paged."""
    return (
        q.numel() * slots >= MIN_WORK
        and keys.dtype == values.dtype == q.dtype
        and q.dtype in DTYPES
        and takes_kernels(q)
        and not unavailable()
    )


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor | None = None,
    tails: Tensor | None = None,
    *,
    window: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Compute the attention of `plain_attend` by a CPU kernel, which reads the KV cache in place; the arguments are the
    same, with queries in the dtype of the cache. Raises Unreadable for tensors that the kernel cannot read."""
    (rows, tokens, heads, d_head), threads, dtype = q.shape, torch.get_num_threads(), q.dtype
    slots, kv_heads, d_value = keys.size(1), keys.size(2), values.size(-1)
    positions, q = positions.contiguous(), q.contiguous()
    slopes = None if slopes is None else slopes.float()
    length = slots if table is None else slots * table.size(1)
    cached = rows if table is None else len(keys)
    d_tail = 0 if tails is None else tails.size(-1)
    key_address, row_slots = rows_address(keys, dtype, cached, slots, kv_heads, d_head - d_tail)
    value_address, value_row_slots = rows_address(values, dtype, cached, slots, kv_heads, d_value)
    tail_address, tail_row_slots = 0, row_slots
    if tails is not None:
        tail_address, tail_row_slots = rows_address(tails, dtype, cached, slots, kv_heads, d_tail)
    if heads % kv_heads or not row_slots == value_row_slots == tail_row_slots:
        raise Unreadable("queries, keys and values of other forms")
    blocks = (0, 0) if table is None else rows_address(table, torch.int64, rows, table.size(1))
    y, target = buffer((rows, tokens, heads, d_value), dtype)
    kernels = emitter("attention")
    options = kernels.Options(window, scale, softcap, sinks is not None, slopes is not None)
    form = kernels.Form(heads, kv_heads, d_head, d_value, DTYPES[dtype], options, table is not None, d_tail)
    _scratch, scores = buffer((threads, form.group, length), torch.float32)
    kernels.attention(form)(
        target,
        address(q, dtype, *q.shape),
        key_address,
        value_address,
        tail_address,
        address(sinks, dtype, heads),
        address(slopes, torch.float32, heads),
        address(positions, torch.int64, rows, tokens),
        rows * tokens,
        tokens,
        slots,
        row_slots,
        scores,
        length,
        *blocks,
        rows * tokens * heads // form.group,
        threads,
    )
    return y
