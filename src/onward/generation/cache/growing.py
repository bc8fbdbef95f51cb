"""The default cache of an engine or a search."""

from __future__ import annotations

from onward.generation.cache.manager import CacheManager
from onward.model.cache import KVCache
from onward.model.decoder import Decoder
from onward.model.divided import cache_config

CHUNK = 512  # the most prompt tokens per call; bounds the memory of masks
STEP = 256  # slots by which a cache grows


def growing_cache(model: Decoder, rows: int, length: int, chunk: int) -> CacheManager:
    """Create a contiguous KV cache of `rows` rows in the model's dtype, and return its manager. The cache grows as
    needed, up to `length` tokens per row; `chunk` is the maximum number of tokens per row in one call of the model."""
    config = cache_config(model)
    return CacheManager(KVCache(config, rows, length, chunk, step=STEP, device=model.device, dtype=model.dtype))
