"""FlexAttention: the mask and the bias are functions of the indices of a query and a key; on CUDA, no (T, S) bias is
made.

Shapes: B batch, T tokens in this call, S keys, H heads, K key/value heads, E d_head.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from onward.model.chosen import ChosenMask
from onward.model.layer_cache import Keys, to_tensor
from onward.model.mask import AttentionMask


def flex(q: Tensor, k: Keys, v: Keys, mask: AttentionMask, *, scale: float) -> Tensor:
    """Compute attention by PyTorch's FlexAttention, which on CUDA never holds the (T, S) bias of the scores in memory:
    q (B, T, H, E), k (B, S, K, E), v (B, S, K, F) -> (B, T, H, F). `scale` multiplies the scores."""
    from torch.nn.attention.flex_attention import create_block_mask

    k, v = (to_tensor(t, q.dtype).transpose(1, 2) for t in (k, v))
    key_positions = mask.key_positions.expand(q.size(0), -1)
    rows, tokens = q.shape[:2]
    query_positions, segments = mask.query_positions.expand(rows, -1), mask.segments
    key_segments: Any = mask.key_segments
    slopes, bias_of = mask.slopes, mask.bias_of
    compute_dtype = torch.promote_types(q.dtype, torch.float32)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        sees = mask.near(query_positions[b, i], key_positions[b, j])
        if isinstance(mask, ChosenMask):
            sees = sees & mask.chosen[b, i, j]
        return sees if segments is None else sees & segments.visible((b, i), key_segments[b, j], key_positions[b, j])

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
    """Return PyTorch's function `flex_attention`, compiled to a fused kernel on CUDA."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
