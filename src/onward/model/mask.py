"""The attention mask of one call: which queries attend to which keys, and the bias of their scores.

Shapes: B rows, T tokens in this call, S keys, H heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onward.model.alibi import ScoreBias, linear_bias
from onward.model.segments import Segments

ALL = slice(None)


def visible(query: Tensor, key: Tensor, window: int) -> Tensor:
    # an empty cache slot has key < 0
    seen = (key <= query) & (key >= 0)
    return seen & (query - key < window) if window else seen


class AttentionMask:
    """The attention mask of one call of the model: which queries attend to which keys, and the bias of their scores.

    Layers with the same window, chunking, position part of the config and number of slots share a mask, which holds
    positions, the window, segments (packed documents and branches) and slopes (of ALiBi). `dense` keeps a dense bias
    for the other layers.

    `plain`: positions are 0, 1, 2, ... in all rows, without a cache.
    """

    def __init__(
        self,
        query_positions: Tensor,
        key_positions: Tensor,
        window: int = 0,
        *,
        chunked: bool = False,
        segments: Segments | None = None,
        plain: bool = False,
        slopes: Tensor | None = None,
        score_bias: ScoreBias | None = None,
    ) -> None:
        self.query_positions = query_positions  # (B or 1, T)
        self.key_positions = key_positions  # (B or 1, S), negative where a cache slot is empty
        self.window = window  # number of positions that a query attends to, itself included, or size of a chunk; 0: all
        self.chunked = chunked  # whether a query attends only to keys of the same chunk of `window` positions
        self.reach = {"window": window, "chunked": chunked}  # keyword arguments for attention kernels
        self.segments = segments  # segments of the queries; None: each row is one document
        self.key_segments = None if segments is None else segments.ids  # index of each key's segment
        self.slopes = slopes  # (H,), the first argument of `bias_of`; None: no bias
        self.bias_of = score_bias  # (slope, query position, key position) -> bias, elementwise
        self.plain = plain
        self.causal_only = plain and not window and slopes is None  # token t attends to tokens 0 to t, without a bias
        self.biases: dict[torch.dtype, Tensor] = {}
        self.parts: dict[tuple[int, int], AttentionMask] = {}  # see `parallel/masks.py`

    @property
    def linear(self) -> bool:
        """Whether attention kernels can compute the scores: without a bias, or with ALiBi's."""
        return self.slopes is None or self.bias_of is linear_bias

    def near(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether queries attend to keys of their own document, given the positions of both."""
        seen = visible(query, key, self.window)
        return seen & (query // self.window == key // self.window) if self.chunked else seen

    def visible(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """Return whether each query attends to each key, (B or 1, T, S) of bool."""
        query, key = self.query_positions[:, queries, None], self.key_positions[:, None, keys]
        seen = self.near(query, key)
        if self.segments is not None and self.key_segments is not None:
            seen = seen & self.segments.visible((ALL, queries, None), self.key_segments[:, None, keys], key)
        return seen

    def score_bias(self, dtype: torch.dtype, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """Return the bias added to the scores, (B or 1, H or 1, T, S): that of the positions, as in ALiBi, and -inf
        where a query does not attend to a key."""
        seen = self.visible(queries, keys)[:, None]
        if self.slopes is None or self.bias_of is None:
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)
        compute_dtype = torch.promote_types(dtype, torch.float32)
        query = self.query_positions[:, None, queries, None].to(compute_dtype)
        key = self.key_positions[:, None, None, keys].to(compute_dtype)
        bias = self.bias_of(self.slopes[:, None, None], query, key)
        return bias.masked_fill(~seen, -math.inf).to(dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return `score_bias` of all queries and keys; it is kept for the other layers."""
        if dtype not in self.biases:
            self.biases[dtype] = self.score_bias(dtype)
        return self.biases[dtype]
