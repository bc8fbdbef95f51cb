"""Rotary positions that depend on the length of a row, as in dynamic NTK and LongRoPE: which lengths rotate keys
equally."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

import torch

from onward.config.decoder import DecoderConfig, at, each
from onward.model.context import rotation


@lru_cache(maxsize=256)
def is_scaled(config: DecoderConfig) -> bool:
    """Return whether the rotary positions of a decoder may depend on the length of a row."""
    return any(part.rotation or getattr(part, "scaling", None) for part in each(config.position))


def rope_key(config: DecoderConfig, rope_length: int) -> bytes:
    """Return the cosines and sines at position 1 as bytes. `rope_length` is the length for which rotary positions are
    scaled. If two lengths give equal bytes, they rotate keys equally, and cached keys can be shared."""
    return rotated(config, rope_length if is_scaled(config) else 1)  # computed once, not for each length


@lru_cache(maxsize=256)
def rotated(config: DecoderConfig, rope_length: int) -> bytes:
    first, length = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1, 1), rope_length, dtype=torch.float64)
    widths = [(at(config.position, i), at(config.attention, i).rope_width(config)) for i in range(config.n_layers)]
    rotations = [rotation(position, width, first, length) for position, width in dict.fromkeys(widths)]
    return repr([[t.tolist() for t in pair] for pair in rotations if pair]).encode()


@lru_cache(maxsize=256)
def last_length(config: DecoderConfig, length: int, most: int) -> int:
    """Return the greatest length, at most `most`, up to which a row of `length` tokens may grow before the scaling of
    its rotary positions changes and all of its keys must be computed again: `most` for most decoders, the original
    context of LongRoPE for shorter rows, and `length` for dynamic scaling beyond the original context."""
    key = rope_key(config, length)
    if most <= length or rope_key(config, most) == key:
        return most
    return length + bisect_left(range(length + 1, most), True, key=lambda longer: rope_key(config, longer) != key)
