"""Attention by the matrix unit of a CPU (AMX), which PyTorch's SDPA uses in bf16 and the kernels of Onward do not."""

from __future__ import annotations

import torch
from torch import Tensor

from onward.kernels.operations import takes_kernels
from onward.model.layer_cache import CacheEntry, Keys
from onward.model.mask import AttentionMask

MIN_TILED = 64  # queries per row from which SDPA with a matrix unit is faster than the kernel


def is_tiled(q: Tensor, v: Keys, mask: AttentionMask) -> bool:
    """Return whether SDPA is faster than the kernel for queries q (B, T, H, E) with at least MIN_TILED tokens. The
    kernel skips slots that are empty or outside a window, and reads values of another dtype or width without a copy."""
    if mask.window or mask.segments or mask.slopes is not None or not has_matrix_unit(q):
        return False
    values = v.cache.entries[v.name] if isinstance(v, CacheEntry) else v
    slots, last = mask.key_positions.size(1), int(mask.query_positions[:, -1].min())
    return values.dtype == q.dtype and values.size(-1) == q.size(-1) and slots <= 2 * (last + 1)


def has_matrix_unit(q: Tensor) -> bool:
    return q.dtype is torch.bfloat16 and takes_kernels(q) and bool(torch.cpu.get_capabilities().get("amx_tile"))
