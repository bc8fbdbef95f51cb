"""Recomputing activations in the backward pass changes no bit of the gradients and reduces memory use."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from onward import Decoder, Experts, LoRA, use_adapter
from onward.model.experts import FASTEST
from onward.transforms import compile_blocks, recompute_blocks

from support.adapters import stirred
from support.decoders import DECODERS, assert_close, config, decoder, token_ids
from support.grids import first

WITH_EXPERTS = config(n_layers=3, dropout=0.3, mlp=Experts(count=5, backend="auto"))
CONFIGS = {name: replace(c, dropout=0.3) for name, c in DECODERS.items()} | {"experts as timed": WITH_EXPERTS}
compiled = partial(compile_blocks, backend="aot_eager")


def results(model: Decoder, precision: str = "fp32") -> list[Tensor]:
    """The logits of a forward pass in training, and all gradients."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        y = model.train()(token_ids(model.config))
    return [y, *torch.autograd.grad(y.float().square().mean(), [p for p in model.parameters() if p.requires_grad])]


def prepared(name: str, *ways: Callable[[Decoder], None]) -> Decoder:
    model = decoder(CONFIGS[name])
    for way in ways:
        way(model)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_recomputed_gradients_are_equal_to_the_bit_with_dropout(name: str, precision: str) -> None:
    wanted = results(prepared(name), precision)
    for got, want in zip(results(prepared(name, recompute_blocks), precision), wanted):
        assert torch.equal(got, want)


@pytest.mark.long
@pytest.mark.parametrize("name", first(1, ["experts as timed", "gemma2"]))  # compiling takes up to two minutes
def test_compiled_recomputation_is_equal_to_the_bit(name: str) -> None:
    wanted = results(prepared(name, compiled))
    for got, want in zip(results(prepared(name, compiled, recompute_blocks)), wanted):
        assert torch.equal(got, want)


def test_recomputation_keeps_block_inputs_only() -> None:
    kept = {}
    for name, ways in {"all": [], "inputs": [recompute_blocks]}.items():
        model = decoder(config(n_layers=12))
        for way in ways:
            way(model)
        seen: dict[int, int] = {}

        def keep(t: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x = token_ids(model.config)
        with saved_tensors_hooks(keep, lambda t: t):
            y = model(x)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept[name] = sum(size for where, size in seen.items() if where not in weights)
        del y
    assert kept["inputs"] < kept["all"] / 5


def test_experts_are_timed_under_recomputation() -> None:
    # a width that no other test uses, so that it has not been timed yet
    model = decoder(replace(WITH_EXPERTS, d_ff=43))
    recompute_blocks(model)
    before = len(FASTEST)
    results(model)
    assert len(FASTEST) > before


@pytest.mark.parametrize("ways", first(1, [[recompute_blocks], [compiled], [compiled, recompute_blocks]]))
def test_copied_model_recomputes_with_its_own_weights(ways: list[Callable[[Decoder], None]]) -> None:
    model = prepared("gpt-oss", *ways)
    other = deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert results(other)[0].count_nonzero() == 0
    assert results(model)[0].count_nonzero() > 0


@torch.no_grad()
def test_adapted_layer_compiles_to_one_graph_per_adapter() -> None:
    model = stirred(decoder(DECODERS["llama"], torch.float64), "one", "two", lora=LoRA(rank=2))
    layer: Any = model.blocks[0].attn.q
    x = torch.randn(1, 2, model.config.d_model, dtype=torch.float64)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for name in "one", "two", "one":
        with use_adapter(model, name):
            assert_close(compiled(x), layer(x))
