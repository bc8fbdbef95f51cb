"""Planned operations equal those that PyTorch counts, and the parameters of the parts add up to those of the
decoder."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from onward import Decoder, DecoderConfig, GatedDeltaNet, KVCache, SelfAttention
from onward.config.decoder import at, each
from onward.families import presets
from onward.planning import (
    active_parameters,
    attention_flops,
    causal_attention_flops,
    flops_per_token,
    part_sizes,
    training_flops,
    weight_flops,
)
from onward.planning.flops import layer_flops, mean_keys
from onward.planning.parameters import parameters

from support.decoders import DECODERS, config

KERNEL = {  # PyTorch's counter does not support the CPU kernel
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 4 * q.numel() * k[2]
}


def counted(model: Decoder, tokens: int, cache: KVCache | None = None) -> int:
    """The operations that PyTorch counts in a call; it also counts masked keys."""
    view = cache.view(length=cache.length) if cache else None
    positions = torch.arange(cache.length - tokens, cache.length)[None] if cache else None
    with FlopCounterMode(display=False, custom_mapping=KERNEL) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long), positions, view)
    return counter.get_total_flops()


WITH_STATES = {name for name, c in DECODERS.items() if any(part.states(c) for part in each(c.attention))}


@pytest.mark.parametrize("name", sorted(DECODERS.keys() - WITH_STATES))
def test_operations_of_a_forward_are_those_counted(name: str) -> None:
    decoder = DECODERS[name]
    attention = sum(8 * (index + pair) for *_, index, pair in layer_flops(decoder))  # all 8 keys, as PyTorch counts
    assert 8 * (weight_flops(decoder) + attention) == counted(Decoder(decoder).eval(), 8)


def written(c: DecoderConfig, layer: int) -> list[tuple[tuple[int, ...], str | None]]:
    """The states that a layer updates with outer products, which PyTorch's counter does not count."""
    return [state for name, state in at(c.attention, layer).states(c).items() if name == "state"]


STEPS = {name: DECODERS[name] for name in ("llama", "deepseek", "mamba2")}
STEPS["gated delta"] = config(attention=GatedDeltaNet(n_heads=2, n_value_heads=4))


@pytest.mark.parametrize("name", STEPS)
def test_operations_of_a_decoding_step_are_those_counted(name: str) -> None:
    decoder = STEPS[name]
    cache = KVCache(decoder, rows=1, length=12, chunk=1)
    cache.states.restore(
        0, 11, {f"{i}.{n}": t[0, 0] for i, one in enumerate(cache.states.layers) for n, t in one.items()}
    )
    model = Decoder(decoder).eval()
    found = weight_flops(decoder) + attention_flops(decoder, 12, decoding=True)
    elementwise = sum(2 * p.numel() for name, p in model.named_parameters() if "conv.weight" in name)
    updates = sum(2 * math.prod(s[0]) for i in range(decoder.n_layers) for s in written(decoder, i))
    assert found - elementwise - updates == counted(model, 1, cache)


def test_a_step_of_training_has_three_forwards_and_recomputation_one_more_without_the_head() -> None:
    decoder = config(attention=SelfAttention(window=3))
    forward = weight_flops(decoder) + causal_attention_flops(decoder, 8)
    head = 2 * decoder.vocab_size * decoder.d_model
    assert training_flops(decoder, 8) == 3 * forward
    assert training_flops(decoder, 8, recompute=True) == 4 * forward - head


@pytest.mark.parametrize(("length", "window"), [(1, 0), (8, 0), (8, 3), (8, 8), (8, 20)])
def test_mean_keys_is_the_mean_of_what_each_token_sees(length: int, window: int) -> None:
    seen = [min(t + 1, window or length) for t in range(length)]
    assert mean_keys(length, window) == pytest.approx(sum(seen) / length)


@pytest.mark.parametrize("name", DECODERS)
def test_parts_add_up_to_the_parameters(name: str) -> None:
    parts = part_sizes(DECODERS[name])
    assert sum(part.parameters for part in parts) == parameters(DECODERS[name])
    assert sum(part.active for part in parts) == active_parameters(DECODERS[name])
    assert "other" not in {part.name for part in parts}


def test_parts_of_gpt2_are_its_published_sizes() -> None:
    gpt2 = presets()["gpt2"].config
    found = {part.name: part.parameters for part in part_sizes(gpt2)}
    biases = 12 * (4 * 768), 12 * (5 * 768)  # biases of attention, of the feed-forward
    assert found == {
        "embedding": 50257 * 768,
        "positions": 1024 * 768,
        "attention": 12 * 4 * 768**2 + biases[0],
        "feed-forward": 12 * 8 * 768**2 + biases[1],
        "norms": 25 * 2 * 768,
        "head": 0,
    }
    assert flops_per_token(gpt2, 0) == 2 * (12 * 12 * 768**2 + 50257 * 768)
