"""The attention masks for parts of a call: for some of its heads, or for some of its queries."""

from __future__ import annotations

from copy import copy

from torch import Tensor

from onward.model.mask import AttentionMask


def with_slopes(mask: AttentionMask, slopes: Tensor) -> AttentionMask:
    """Return the mask for attention over some of the heads only, whose slopes are `slopes`."""
    other = copy(mask)
    other.slopes, other.biases, other.parts = slopes, {}, {}
    return other


def part(mask: AttentionMask, start: int, end: int) -> AttentionMask:
    """Return the mask of the queries from index `start` to `end` over the keys before `end`, if each token is a query
    and a key; it is kept for the other layers."""
    if (start, end) not in mask.parts:
        other = mask.parts[start, end] = copy(mask)
        other.query_positions, other.key_positions = mask.query_positions[:, start:end], mask.key_positions[:, :end]
        if mask.segments is not None:
            other.segments, other.key_segments = mask.segments.part(start, end), mask.segments.ids[:, :end]
        other.plain, other.causal_only = mask.plain and not start, mask.causal_only and not start
        other.biases, other.parts = {}, {}
    return mask.parts[start, end]
