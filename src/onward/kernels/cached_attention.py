"""Attention that reads the visible positions of a cache in place, without gathering keys and values.

In a contiguous cache, position p of row b is in slot p % S of row b. In a paged cache, whose blocks have S slots, it is
in slot p % S of block table[b, p // S]. Shapes: B rows, T tokens in a call, S slots, P blocks of a row, H heads, K
key/value heads, E d_head, F d_value; R last elements of each key, stored in a separate cache entry, the tails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.kernels.llvm import cached_attention
from onward.kernels.memory import DTYPES, Unreadable, address, buffer, rows_address


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
    chunked: bool = False,
) -> Tensor:
    """Compute attention with queries q (B, T, H, E) at positions (B, T) to the entries of a KV cache: keys (B, S, K, E)
    and values (B, S, K, F) or, with a block table (B, P), (blocks, S, K, E) and (blocks, S, K, F). With `tails`, (B, S,
    K, R) or (blocks, S, K, R), the keys are E - R wide, followed by the tails. With `scales`, (B, S, K, 1) or (blocks,
    S, K, 1) for each of keys, values and tails, these three are int8 codes. Returns (B, T, H, F).

    A query sees the positions up to its own, the last `window` of them (0: all) or, with `chunked`, those in its chunk
    of `window` positions. `scale` multiplies the scores; `softcap` c replaces scores s by c * tanh(s / c); `sinks` (H,)
    are one additional score per head, without a value; `slopes` (H,) times the distance between query and key are
    subtracted from the scores (ALiBi). The queries are in the dtype of the cache or of its scales. Raises Unreadable
    for tensors that the kernel cannot read.
    """
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
        raise Unreadable("queries, keys and values of other layouts")
    addresses = [[start for start, _ in each] + [0] * (3 - len(each)) for each in (pairs, of_scales)]
    blocks = (0, 0) if table is None else rows_address(table, torch.int64, rows, table.size(1))
    y, target = buffer((rows, tokens, heads, d_value), dtype)
    options = cached_attention.ScoreOptions(window, chunked, scale, softcap, sinks is not None, slopes is not None)
    paged, quantized = table is not None, bool(scales)
    form = cached_attention.AttentionForm(
        heads, kv_heads, d_head, d_value, DTYPES[dtype], options, paged, d_tail, quantized
    )
    _scratch, scores = buffer((threads, form.group, length), torch.float32)
    cached_attention.attention(form)(
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
