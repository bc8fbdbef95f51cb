"""What attention knows of one call of the model: raw facts, from which each backend makes what it needs.

Shapes: B rows, T tokens in this call, S keys, H heads, E d_head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onward.model.cache import CacheEntry, CacheView, LayerCache, SlotIndices
from onward.model.config import DecoderConfig, at
from onward.model.positions import rotate

ALL = slice(None)


def visible(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Whether the token at position `query` sees the token at position `key`; an empty cache slot has key < 0."""
    seen = (key <= query) & (key >= 0)
    return seen & (query - key < window) if window else seen


def segment_ids(positions: Tensor) -> Tensor:
    """Which packed document each token belongs to, (B, T): a document begins where a position is not the one before
    plus one."""
    begins = positions[:, 1:] != positions[:, :-1] + 1
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))


class AttentionMask:
    """Who sees whom in one call, and the bias of each pair of tokens; shared by all layers of a kind.

    It holds facts: positions of queries and keys, the window, segment ids, slopes. Dense tensors are made when a
    backend asks for them, and kept for the other layers.
    """

    def __init__(
        self,
        query_positions: Tensor,
        key_positions: Tensor,
        window: int = 0,
        *,
        segments: Tensor | None = None,
        plain: bool = False,
        slopes: Tensor | None = None,
        score_bias: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.query_positions = query_positions  # (B or 1, T)
        self.key_positions = key_positions  # (B or 1, S), negative where a cache slot is empty
        self.window = window  # how many positions back a token sees, itself included; 0: all
        self.segments = segments  # (B, T), the packed document of each token; None: one document
        self.slopes = slopes  # (H,), the first argument of `bias_of`; None: nothing is added to the scores
        self.bias_of = score_bias  # (slope, query position, key position) -> bias, elementwise
        self.causal_only = plain and not window and slopes is None  # token t sees tokens 0 to t, nothing is biased
        self._biases: dict[torch.dtype, Tensor] = {}

    def visible(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """Which tokens see which, (B or 1, T, S) of bool, for these queries and keys."""
        query, key = self.query_positions[:, queries, None], self.key_positions[:, None, keys]
        seen = visible(query, key, self.window)
        if self.segments is not None:
            seen = seen & (self.segments[:, queries, None] == self.segments[:, None, keys])
        return seen

    def score_bias(self, dtype: torch.dtype, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """What is added to the scores, (B or 1, H or 1, T, S): the position's bias, -inf where a key is not seen."""
        seen = self.visible(queries, keys)[:, None]
        if self.slopes is None or self.bias_of is None:
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)
        exact = torch.promote_types(dtype, torch.float32)
        query = self.query_positions[:, None, queries, None].to(exact)
        key = self.key_positions[:, None, None, keys].to(exact)
        bias = self.bias_of(self.slopes[:, None, None], query, key)
        return bias.masked_fill(~seen, -math.inf).to(dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """`score_bias` of all queries and keys, made once per dtype."""
        if dtype not in self._biases:
            self._biases[dtype] = self.score_bias(dtype)
        return self._biases[dtype]


@dataclass(frozen=True, eq=False)
class AttentionContext:
    """What one layer knows of the tokens in this call."""

    mask: AttentionMask
    rotation: tuple[Tensor, Tensor] | None = None  # cosines and sines, each (B, T, 1, rope_dim / 2)
    cache: LayerCache | None = None  # the keys and values of earlier tokens
    indices: SlotIndices | None = None  # where this call writes and reads in the cache

    def rotate(self, x: Tensor) -> Tensor:
        """Vectors (B, T, H, E) turned by the angles of their positions, where positions are rotary."""
        return x if self.rotation is None else rotate(x, *self.rotation)

    def update(self, **new: Tensor) -> tuple[Tensor | CacheEntry, ...]:
        """Write vectors (B, T, ...) of this call's tokens to the cache; returns what attention reads: the entries of
        the cache or, without one, the vectors themselves."""
        if self.cache is None or self.indices is None:
            return tuple(new.values())
        return tuple(self.cache.update(name, vectors, self.indices) for name, vectors in new.items())


def attention_contexts(
    config: DecoderConfig, dtype: torch.dtype, positions: Tensor, cache: CacheView | None, *, plain: bool
) -> list[AttentionContext]:
    """One AttentionContext per layer, for tokens at positions (B, T).

    Layers that are alike share masks and rotations. `plain`: positions are 0, 1, 2, ... in every row, without a cache.
    Rotary angles are computed in at least fp32.
    """
    exact = positions.to(torch.promote_types(dtype, torch.float32))
    rope_length = (cache.rope_length.to(exact) if cache else exact.amax(1) + 1)[:, None, None]
    segments = None if plain or cache else segment_ids(positions)
    indices: dict[tuple[int, int], SlotIndices] = {}
    masks: dict[object, AttentionMask] = {}
    rotations: dict[object, tuple[Tensor, Tensor] | None] = {}
    slopes: Mapping[object, Tensor | None] = {
        part: part.slopes(config, positions.device) for part in {at(config.position, i) for i in range(config.n_layers)}
    }
    contexts = []
    for layer in range(config.n_layers):
        attention, position = at(config.attention, layer), at(config.position, layer)
        layer_cache = cache.layers[layer] if cache else None
        kind = attention.window, layer_cache.slots if layer_cache else 0
        if layer_cache and kind not in indices:
            indices[kind] = layer_cache.slot_indices(positions)
        found = indices.get(kind)
        if (position, kind) not in masks:
            masks[position, kind] = AttentionMask(
                positions,
                found.key_positions if found else positions,
                attention.window,
                segments=segments,
                plain=plain,
                slopes=slopes[position],
                score_bias=partial(position.score_bias, config),
            )
        turn = position, attention.rope_width(config)
        if turn not in rotations:
            rotations[turn] = position.rotation(turn[1], exact, rope_length)
        contexts.append(AttentionContext(masks[position, kind], rotations[turn], layer_cache, found))
    return contexts
