"""Attention that reads the visible positions of a cache in its memory, without gathering keys and values.

In a contiguous cache, position p of row b is in slot p % S of row b. In a paged cache, whose blocks have S slots, it is
in slot p % S of block table[b, p // S].
Shapes: B rows, T tokens in a call, S slots, P blocks of a row, H heads, K key/value heads, E d_head, F d_value; R last
elements of the keys that are in an entry of their own, the tails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    scales: Sequence[Tensor] = (),
    *,
    window: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Compute attention in plain PyTorch with queries q (B, T, H, E) at positions (B, T) to the entries of a KV cache:
    keys (B, S, K, E) and values (B, S, K, F) or, with a block table (B, P), (blocks, S, K, E) and (blocks, S, K, F).
    With `tails`, (B, S, K, R) or (blocks, S, K, R), the keys are E - R wide, followed by the tails. With `scales`,
    (B, S, K, 1) or (blocks, S, K, 1), of keys, values and tails, these are int8 codes. Returns (B, T, H, F).

    A query sees the positions up to its own, the last `window` of them (0: all). `scale` multiplies the scores;
    `softcap` c replaces scores s by c * tanh(s / c); `sinks` (H,) are one more score per head, without a value;
    `slopes` (H,) times the distance of query and key are subtracted from the scores (ALiBi).
    """
    entries = [entry for entry in (keys, values, tails) if entry is not None]
    if scales:
        entries = [codes.float() * scale.float() for codes, scale in zip(entries, scales, strict=True)]
    keys, values = torch.cat([entries[0], *entries[2:]], -1), entries[1]
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


def takes_kernel(q: Tensor, entries: Sequence[Tensor], slots: int) -> bool:
    """Return whether the CPU kernel can compute attention of queries q (B, T, H, E), each of which sees up to `slots`
    positions, to these entries of a KV cache, contiguous or paged: keys and values or, in a quantized cache, their
    scales."""
    return (
        q.numel() * slots >= MIN_WORK
        and all(entry.dtype == q.dtype for entry in entries)
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
    scales: Sequence[Tensor] = (),
    *,
    window: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Compute the attention of `plain_attend` by a CPU kernel, which reads the KV cache in place; the arguments are the
    same, with queries in the dtype of the cache or of its scales. Raises Unreadable for tensors that the kernel cannot
    read."""
    (rows, tokens, heads, d_head), threads, dtype = q.shape, torch.get_num_threads(), q.dtype
    slots, kv_heads, d_value = keys.size(1), keys.size(2), values.size(-1)
    positions, q = positions.contiguous(), q.contiguous()
    slopes = None if slopes is None else slopes.float()
    length = slots if table is None else slots * table.size(1)
    cached = rows if table is None else len(keys)
    d_tail, entry_dtype = 0 if tails is None else tails.size(-1), torch.int8 if scales else dtype
    entries = [(keys, d_head - d_tail), (values, d_value), *([] if tails is None else [(tails, d_tail)])]
    pairs = [rows_address(entry, entry_dtype, cached, slots, kv_heads, width) for entry, width in entries]
    of_scales = [rows_address(one, dtype, cached, slots, kv_heads, 1) for one in scales]
    if heads % kv_heads or len({row_slots for _, row_slots in pairs + of_scales}) > 1:
        raise Unreadable("queries, keys and values of other forms")
    addresses = [[start for start, _ in each] + [0] * (3 - len(each)) for each in (pairs, of_scales)]
    blocks = (0, 0) if table is None else rows_address(table, torch.int64, rows, table.size(1))
    y, target = buffer((rows, tokens, heads, d_value), dtype)
    kernels = emitter("attention")
    options = kernels.Options(window, scale, softcap, sinks is not None, slopes is not None)
    paged, quantized = table is not None, bool(scales)
    form = kernels.Form(heads, kv_heads, d_head, d_value, DTYPES[dtype], options, paged, d_tail, quantized)
    _scratch, scores = buffer((threads, form.group, length), torch.float32)
    kernels.attention(form)(
        target,
        address(q, dtype, *q.shape),
        *addresses[0],
        *addresses[1],
        address(sinks, dtype, heads),
        address(slopes, torch.float32, heads),
        address(positions, torch.int64, rows, tokens),
        rows * tokens,
        tokens,
        slots,
        pairs[0][1],
        scores,
        length,
        *blocks,
        rows * tokens * heads // form.group,
        threads,
    )
    return y
