"""The inputs of one layer's attention besides x, for one call of the model: positions, mask, rotation and cache.

Shapes: B rows, T tokens in this call, P width of a layer's `inputs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onward.config.decoder import Alibi, DecoderConfig, Position, Rotary, at
from onward.config.scaling import Scaling
from onward.config.shared_keys import kv_source
from onward.kernels.operations import rotate
from onward.model.alibi import score_bias
from onward.model.cache import CacheView
from onward.model.frequencies import scaled_frequencies
from onward.model.layer_cache import CacheEntry, LayerCache, SlotIndices
from onward.model.mask import AttentionMask
from onward.model.segments import Segments


class SharedKeys:
    """Keys and values, or masks, that later layers reuse, by layer; not a dict, since FSDP copies the dicts among the
    arguments."""

    def __init__(self) -> None:
        self.of_layer: dict[int, Any] = {}


@dataclass(frozen=True, eq=False)
class AttentionContext:
    """The inputs of one layer's attention besides x, for one call of the model: positions, mask, rotary cosines and
    sines, and the layer's KV cache."""

    mask: AttentionMask
    rotation: tuple[Tensor, Tensor] | None = None  # cosines and sines, each (B, T, 1, rope_dim / 2)
    cache: LayerCache | None = None  # the layer's keys and values of earlier tokens; None: no cache
    indices: SlotIndices | None = None  # the slots that this call writes and reads
    shared: SharedKeys = field(default_factory=SharedKeys)  # keys and values, or masks, that other layers also use
    inputs: Tensor | None = None  # vectors of the tokens for this layer, (B, T, P), of a block with `layer_inputs`

    @property
    def num_tokens(self) -> int:
        return self.mask.query_positions.size(1)

    def rotate(self, x: Tensor) -> Tensor:
        return x if self.rotation is None else rotate(x, *self.rotation)

    def update(self, **new: Tensor) -> tuple[Tensor | CacheEntry, ...]:
        """Write the vectors (B, T, ...) of this call's tokens to the layer's cache, under the names of the keyword
        arguments, such as k and v; returns the cache entries or, without a cache, the vectors."""
        if self.cache is None or self.indices is None:
            return tuple(new.values())
        return tuple(self.cache.update(name, vectors, self.indices) for name, vectors in new.items())


def attention_contexts(
    config: DecoderConfig, dtype: torch.dtype, positions: Tensor, cache: CacheView | None, *, plain: bool
) -> list[AttentionContext]:
    """Return one AttentionContext per layer, for tokens at positions (B, T). Layers with equal attention and position
    parts share masks and rotations. `plain`: positions are 0, 1, 2, ... in all rows, without a cache. Rotary angles are
    computed in at least fp32; `dtype` is that of the hidden states."""
    angle_positions = positions.to(torch.promote_types(dtype, torch.float32))
    rope_length = (cache.rope_length.to(angle_positions) if cache else angle_positions.amax(1) + 1)[:, None, None]
    segments, shared = None if plain or cache else Segments.of(positions), SharedKeys()
    indices: dict[object, SlotIndices] = {}
    masks: dict[object, AttentionMask] = {}
    rotations: dict[object, tuple[Tensor, Tensor] | None] = {}
    contexts: list[AttentionContext] = []  # torch.compile cannot trace list[AttentionContext]()
    for layer in range(config.n_layers):
        attention, position = at(config.attention, layer), at(config.position, layer)
        layer_cache = cache.layers[kv_source(config, layer) if attention.shares_kv else layer] if cache else None
        slots_key = attention.window, attention.chunked, type(layer_cache), layer_cache.slots if layer_cache else 0
        if layer_cache and slots_key not in indices:
            indices[slots_key] = layer_cache.slot_indices(positions)
        slot_indices = indices.get(slots_key)
        is_biased = position.slopes is not None or isinstance(position, Alibi)
        n_heads = attention.heads(config).n_heads if is_biased else 0
        mask_key = position, n_heads, slots_key
        if mask_key not in masks:
            bias = score_bias(position, config, n_heads, positions.device) if is_biased else None
            slopes, bias_of = bias or (None, None)
            masks[mask_key] = AttentionMask(
                positions,
                slot_indices.key_positions if slot_indices else positions,
                attention.window,
                chunked=attention.chunked,
                segments=segments,
                plain=plain,
                slopes=slopes,
                score_bias=bias_of,
            )
        rotation_key = position, attention.rope_width(config)
        if rotation_key not in rotations:
            rotations[rotation_key] = rotation(*rotation_key, angle_positions, rope_length)
        rotated = rotations[rotation_key]
        contexts.append(AttentionContext(masks[mask_key], rotated, layer_cache, slot_indices, shared=shared))
    return contexts


def rotates(part: Position) -> bool:
    return part.rotation is not None or isinstance(part, Rotary)


def rotation(part: Position, width: int, positions: Tensor, rope_length: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the cosines and sines, each (B, T, 1, rope_dim / 2), by which heads of size `width` are rotated; None if
    `part` rotates nothing.

    `positions` (B, T) and `rope_length` (B, 1, 1), the length for which each row's frequencies are scaled, have the
    dtype to compute in, at least fp32.
    """
    if part.rotation is not None:
        return part.rotation(width, positions, rope_length)
    return rotary(part, width, positions, rope_length) if isinstance(part, Rotary) else None


def rotary(part: Rotary, width: int, positions: Tensor, rope_length: Tensor) -> tuple[Tensor, Tensor]:
    angles = angles_at(positions, part.theta, part.rope_dim(width), part.scaling, rope_length)[:, :, None]
    magnitude = part.scaling.magnitude if part.scaling else 1.0
    return angles.cos() * magnitude, angles.sin() * magnitude


def angles_at(
    positions: Tensor, theta: float, rope_dim: int, scaling: Scaling | None = None, rope_length: Tensor | None = None
) -> Tensor:
    """Return the angle of each pair i of elements, position * theta ** (-2 i / rope_dim), as (B, T, rope_dim / 2), or
    with the frequencies of a `scaling` (such as YaRN) for rows of the lengths `rope_length` (B, 1, 1)."""
    pairs = torch.arange(0, rope_dim, 2, device=positions.device, dtype=positions.dtype)
    frequencies = theta ** (-pairs / rope_dim)
    if scaling is not None and rope_length is not None:
        frequencies = scaled_frequencies(scaling, frequencies, theta, rope_length)
    return positions[..., None] * frequencies
