"""The attention mask of one call: which queries attend to which keys, and the bias of their scores.

Shapes: B rows, T tokens in this call, S keys, H heads.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.model.positions import ScoreBias, linear_bias

ALL = slice(None)


def visible(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Return whether the token at position `query` attends to the token at position `key`, elementwise; an empty cache
    slot has key < 0.

    `window` is the number of positions that a query attends to, itself included; 0: all.
    """
    seen = (key <= query) & (key >= 0)
    return seen & (query - key < window) if window else seen


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of the rows of a batch, each tensor (B, T): a segment begins where a position is not the previous
    one plus one.

    A segment that begins at position 0 is a packed document. One that begins at a position s > 0 is a branch of the
    nearest document before it: it continues the first s tokens of this document, as several completions of one prompt
    do.
    """

    ids: Tensor  # index of each token's segment
    documents: Tensor  # index of the document that contains the segment
    starts: Tensor  # position where the segment begins

    @staticmethod
    def of(positions: Tensor) -> Segments:
        """Return the segments of rows of tokens at positions (B, T), from the places where a position is not the
        previous one plus one."""
        begins = torch.nn.functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
        ids = begins.cumsum(1) - 1
        indices = torch.arange(positions.size(1), device=positions.device)
        starts = positions.gather(1, torch.where(begins, indices, 0).cummax(1).values)
        documents = torch.where(begins & (positions == 0), ids, 0).cummax(1).values
        return Segments(ids, documents, starts)

    def part(self, start: int, end: int) -> Segments:
        """Return the segments of the tokens from index `start` to `end` of each row."""
        return Segments(self.ids[:, start:end], self.documents[:, start:end], self.starts[:, start:end])

    def visible(self, query: tuple[Any, ...], key_ids: Tensor, key_positions: Tensor) -> Tensor:
        """Return whether tokens at the indices `query` may attend to tokens of the segments `key_ids`, at the positions
        `key_positions`: both are in the same segment, or the key is in the prefix that the query's branch continues.
        Windows and causality are not considered."""
        same = self.ids[query] == key_ids
        return same | (self.documents[query] == key_ids) & (key_positions < self.starts[query])


class AttentionMask:
    """The attention mask of one call of the model: which queries attend to which keys, and the bias of their scores.

    Layers with the same window, position part of the config and number of slots share a mask. A mask holds positions,
    the window, segments (packed documents and branches) and slopes (of ALiBi); a backend that needs a dense bias calls
    `dense`, which keeps the bias for the other layers.

    `plain`: positions are 0, 1, 2, ... in all rows, without a cache.
    """

    def __init__(
        self,
        query_positions: Tensor,
        key_positions: Tensor,
        window: int = 0,
        *,
        segments: Segments | None = None,
        plain: bool = False,
        slopes: Tensor | None = None,
        score_bias: ScoreBias | None = None,
    ) -> None:
        self.query_positions = query_positions  # (B or 1, T)
        self.key_positions = key_positions  # (B or 1, S), negative where a cache slot is empty
        self.window = window  # number of positions that a query attends to, itself included; 0: all
        self.segments = segments  # of the queries; None: each row is one document
        self.key_segments = None if segments is None else segments.ids  # index of each key's segment
        self.slopes = slopes  # (H,), the first argument of `bias_of`; None: no bias
        self.bias_of = score_bias  # (slope, query position, key position) -> bias, elementwise
        self.plain = plain
        self.causal_only = plain and not window and slopes is None  # token t attends to tokens 0 to t, without a bias
        self._biases: dict[torch.dtype, Tensor] = {}
        self._parts: dict[tuple[int, int], AttentionMask] = {}

    @property
    def linear(self) -> bool:
        """Whether the scores have no bias, or one that is linear in the distance of query and key (ALiBi), which
        attention kernels can compute."""
        return self.slopes is None or self.bias_of is linear_bias

    def with_slopes(self, slopes: Tensor) -> AttentionMask:
        """Return this mask with `slopes` (H,) as the slopes of the score bias, for attention over some of the heads
        only."""
        other = copy(self)
        other.slopes, other._biases, other._parts = slopes, {}, {}
        return other

    def part(self, start: int, end: int) -> AttentionMask:
        """Return the mask of the queries from index `start` to `end` over the keys before `end`, if each token is a
        query and a key; it is kept for the other layers."""
        if (start, end) not in self._parts:
            other = self._parts[start, end] = copy(self)
            other.query_positions = self.query_positions[:, start:end]
            other.key_positions = self.key_positions[:, :end]
            if self.segments is not None:
                other.segments, other.key_segments = self.segments.part(start, end), self.segments.ids[:, :end]
            other.plain, other.causal_only = self.plain and not start, self.causal_only and not start
            other._biases, other._parts = {}, {}
        return self._parts[start, end]

    def visible(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """Return whether each query of the slice `queries` attends to each key of the slice `keys`, (B or 1, T, S) of
        bool."""
        query, key = self.query_positions[:, queries, None], self.key_positions[:, None, keys]
        seen = visible(query, key, self.window)
        if self.segments is not None and self.key_segments is not None:
            seen = seen & self.segments.visible((ALL, queries, None), self.key_segments[:, None, keys], key)
        return seen

    def score_bias(self, dtype: torch.dtype, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """Return the bias added to the scores, (B or 1, H or 1, T, S): the bias of the positions, as in ALiBi, and -inf
        where a query does not attend to a key. `queries` and `keys` are the slices to compute."""
        seen = self.visible(queries, keys)[:, None]
        if self.slopes is None or self.bias_of is None:
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)
        compute_dtype = torch.promote_types(dtype, torch.float32)
        query = self.query_positions[:, None, queries, None].to(compute_dtype)
        key = self.key_positions[:, None, None, keys].to(compute_dtype)
        bias = self.bias_of(self.slopes[:, None, None], query, key)
        return bias.masked_fill(~seen, -math.inf).to(dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return `score_bias` of all queries and keys, (B or 1, H or 1, T, S) in `dtype`; it is computed once per dtype
        and kept."""
        if dtype not in self._biases:
            self._biases[dtype] = self.score_bias(dtype)
        return self._biases[dtype]
