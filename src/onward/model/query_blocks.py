"""Blocks of queries and the keys that they see, for attention over long rows.

Shapes: T tokens in this call, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from onward.model.mask import AttentionMask


def query_blocks(mask: AttentionMask, tokens: int, slots: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Yield a slice of the queries for each block of `block` queries, and a slice of the keys that includes all keys
    that the block attends to. The T = `tokens` queries belong to the last T of the S = `slots` tokens."""
    before = slots - tokens
    for start in range(0, tokens, block):
        end = min(start + block, tokens)
        first, branched, s = 0, False, mask.segments
        if s is not None and mask.key_segments is not None:
            # the least index, over all rows, at which the document of the block's first token begins
            first = int((mask.key_segments < s.documents[:, start, None]).sum(1).min())
            branched = bool((s.ids != s.documents)[:, start:end].any())  # a branch's window reaches into its document
        if mask.window and not branched:
            first = max(first, before + start - mask.window + 1)
        yield slice(start, end), slice(first, before + end)
