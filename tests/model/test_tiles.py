"""The attention of long pieces of prompts in bf16 is computed by SDPA on a matrix unit, if that is faster."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

import onward
from onward import BlockManager, CacheManager, Decoder, DecoderConfig, KVCache, PagedKVCache
from onward.kernels import operations
from onward.kernels.available import unavailable
from onward.model import attention, tiles

from support.decoders import assert_close

SIZES: dict[str, Any] = {"vocab_size": 11, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
TOKENS = torch.arange(3 * tiles.MIN_TILED)[None] % 11


@pytest.fixture(autouse=True)
def any_machine_has_a_matrix_unit() -> Iterator[None]:
    with patch.object(tiles, "has_matrix_unit", lambda q: q.dtype is torch.bfloat16 and not torch.is_grad_enabled()):
        yield


def manager_of(kind: str, config: DecoderConfig, slots: int = 192) -> CacheManager:
    bf16: Any = {"dtype": torch.bfloat16}
    if kind == "paged":
        return BlockManager(PagedKVCache(config, 1, slots, 128, blocks=slots // 16 + 1, block_size=16, **bf16))
    return CacheManager(KVCache(config, 1, slots, 128, quantized=kind == "quantized", **bf16))


def prefill(config: DecoderConfig, kind: str = "contiguous", slots: int = 192) -> tuple[torch.Tensor, int]:
    """The logits (T, V) of TOKENS in two pieces, and the number of calls of SDPA."""
    torch.manual_seed(0)
    model, manager = Decoder(config).to(torch.bfloat16).eval(), manager_of(kind, config, slots)
    out = []
    with torch.inference_mode(), patch.object(attention, "sdpa", wraps=attention.sdpa) as sdpa:
        for start, end in (0, 96), (96, TOKENS.size(1)):
            assert manager.reserve(0, start, end)
            out.append(model(TOKENS[:, start:end], torch.arange(start, end)[None], manager.cache.view(0, 1))[0])
    return torch.cat(out).float(), sdpa.call_count


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_pieces_of_a_prompt_have_the_logits_of_the_kernel(kind: str) -> None:
    config = DecoderConfig(**SIZES, context_length=192)
    found, calls = prefill(config, kind)
    assert calls == 2 * config.n_layers
    available = not unavailable()
    with patch.object(attention, "MIN_TILED", 10**6), patch.object(operations, "MIN_WORK", 1):
        wanted, calls = prefill(config, kind)
    assert calls == (0 if available else 2 * config.n_layers)
    assert_close(found, wanted, 3e-2)


SKIPPED: dict[str, tuple[dict[str, Any], str, int]] = {
    "windows": ({"attention": onward.SelfAttention(window=32)}, "contiguous", 192),
    "a bias": ({"position": onward.Alibi()}, "contiguous", 192),
    "an int8 cache": ({}, "quantized", 192),
    "slots that are mostly empty": ({}, "contiguous", 2048),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_the_kernel_computes_what_it_skips(name: str) -> None:
    parts, kind, slots = SKIPPED[name]
    config = DecoderConfig(**SIZES, **parts, context_length=slots)
    with patch.object(attention, "without_gathering", wraps=attention.without_gathering) as kernel:
        prefill(config, kind, slots)
    assert kernel.call_count == 2 * config.n_layers


def test_without_a_cache_plain_texts_are_tiled_and_packed_ones_are_not() -> None:
    model = Decoder(DecoderConfig(**SIZES, context_length=192)).to(torch.bfloat16).eval()
    packed = torch.arange(TOKENS.size(1))[None] % 96
    with torch.inference_mode(), patch.object(attention, "without_gathering", return_value=None) as kernel:
        model(TOKENS)
        assert kernel.call_count == 0
        model(TOKENS, packed)
        assert kernel.call_count == 2
    with patch.object(attention, "without_gathering", return_value=None) as kernel:
        model(TOKENS).float().sum().backward()
        assert kernel.call_count == 2
