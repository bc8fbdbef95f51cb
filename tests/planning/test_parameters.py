"""Sizes are counted on one block of each kind, and equal those of the complete decoder."""

import math
from dataclasses import replace

import pytest
import torch

from onward import Decoder, DecoderConfig, Experts, Gated, KVCache, LayerNorm, NoNorm, RMSNorm, SelfAttention, UserError
from onward.families import preset
from onward.planning import active_parameters, cache_bytes_per_token
from onward.planning.parameters import biases, modules, parameters

from support.decoders import DECODERS, config

CONFIGS = {
    **DECODERS,
    "blocks that take turns": replace(DECODERS["deepseek"], n_layers=7, norm=(RMSNorm(), LayerNorm())),
    "a last layer with another norm": config(n_layers=3, norm=(RMSNorm(), RMSNorm(), LayerNorm())),
    "a last layer with no norm": config(n_layers=2, norm=(RMSNorm(), NoNorm())),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_the_trainable_ones_of_the_decoder(name: str) -> None:
    model = Decoder(CONFIGS[name])
    assert parameters(CONFIGS[name]) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "all_of_them", "active"),
    [
        ("gpt2", 124_439_808, 124_439_808),
        ("llama-2-7b", 6_738_415_616, 6_738_415_616),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
    ],
)
def test_active_parameters_count_top_k_experts(name: str, all_of_them: int, active: int) -> None:
    found = preset(name).config
    assert (parameters(found), active_parameters(found)) == (all_of_them, active)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("falcon-h1-0.5b", "0.52"),
        ("falcon-h1-1.5b-deep", "1.55"),
        ("falcon-h1-7b", "7.59"),
        ("falcon-h1-34b", "33.6"),
        ("gemma-4-26b-a4b", "25.2"),
        ("gemma-4-31b", "30.7"),
        ("glm-5", "744"),
    ],
)
def test_presets_have_their_published_billions_of_parameters(name: str, published: str) -> None:
    with torch.device("meta"):
        model = Decoder(preset(name).config)
    billions = sum(p.numel() for p in model.parameters()) / 1e9  # including those of indexers, which are not trained
    assert f"{billions:.{len(published.partition('.')[2])}f}" == published


def test_small_gemma_4_has_its_published_parameters_beside_the_embeddings_of_layers() -> None:
    found = preset("gemma-4-e2b").config
    assert f"{(parameters(found) - found.n_layers * 256 * found.vocab_size) / 1e9:.1f}" == "2.3"


@pytest.mark.parametrize("d_shared", [0, 8])
def test_all_parameters_are_active_where_all_experts_are(d_shared: int) -> None:
    experts = Experts(count=4, top_k=4, d_shared=d_shared, bias=True)
    assert active_parameters(config(mlp=experts)) == parameters(config(mlp=experts))
    some = config(mlp=(Gated(), replace(experts, top_k=1)))
    one = 3 * 16 * some.d_ff + 2 * some.d_ff + 16  # gate, up and down with their biases
    assert parameters(some) - active_parameters(some) == 3 * one


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gpt2", 2 * 12 * 12 * 64 * 2), ("llama-2-7b", 2 * 32 * 32 * 128 * 2), ("mistral-7b", 2 * 32 * 8 * 128 * 2)],
)
def test_cache_bytes_are_those_of_keys_and_values(name: str, expected: int) -> None:
    assert cache_bytes_per_token(preset(name).config) == expected
    assert cache_bytes_per_token(preset(name).config, bytes_per_number=1) == expected // 2


@pytest.mark.parametrize("name", DECODERS)
def test_cache_bytes_equal_the_allocated_ones(name: str) -> None:
    c = DECODERS[name]
    cache = KVCache(c, rows=1, length=c.context_length, chunk=1)
    held = [tensor.nbytes // tensor.size(1) for store in cache.layers for tensor in store.entries.values()]
    assert cache_bytes_per_token(c, bytes_per_number=4) == sum(held)


def test_cache_of_a_layer_with_a_window_stops_growing() -> None:
    c = config(n_layers=3, attention=(SelfAttention(window=4), SelfAttention(window=6), SelfAttention()))
    layer = cache_bytes_per_token(c) // 3
    growth = [cache_bytes_per_token(c, length=length) // layer for length in (0, 3, 4, 5, 6, math.inf)]
    assert growth == [3, 3, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", "q, k, v, out, mlp, norms"),
        ("llama", "none"),
        ("gpt", "head, norms"),
        ("gpt-oss", "q, k, v, mlp, router"),
        ("deepseek", "q_down, kv_down, out"),
    ],
)
def test_biases_are_listed_by_layer(name: str, expected: str) -> None:
    assert biases(DECODERS[name]) == expected


@pytest.mark.parametrize(("name", "kinds"), [("llama-2-70b", 1), ("gemma-2-27b", 2), ("deepseek-v3", 2)])
def test_equal_blocks_are_built_once(name: str, kinds: int) -> None:
    *blocks, rest = modules(preset(name).config)
    assert len(blocks) == kinds
    assert sum(count for _, count in blocks) == preset(name).config.n_layers
    assert rest[1] == 1


def test_a_defect_of_a_part_is_no_matter_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Gated, "build", build)
    with pytest.raises(RuntimeError, match="a defect"):
        parameters(DecoderConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=1))


def test_sizes_beyond_a_tensor_are_refused_in_one_sentence() -> None:
    most = (1 << 31) - 1
    huge = DecoderConfig(vocab_size=most, d_model=1 << 30, n_layers=1, n_heads=32, d_ff=8, d_embed=most)
    with pytest.raises(UserError, match="no tensor can have"):
        parameters(huge)
