"""Decoding steps on CUDA: the work that a graph replays, tested on any device by repeating the step on the same
memory."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onward import BlockManager, CacheManager, Decoder, DecoderConfig, Engine, KVCache, PagedKVCache, Request, Sampling
from onward.compiled.graphs import GraphStep, Replay, captured
from onward.compiled.interface import decoding_step

from support.decoders import DECODERS
from support.devices import device, on_device

CUDA = pytest.mark.skipif(device().type != "cuda", reason="needs a GPU: pytest --device cuda")


def repeated(step: Callable[[], Tensor]) -> Replay:
    """Replaces `captured` on devices without CUDA graphs."""
    result = step().clone()
    return lambda: result.copy_(step())


def contiguous(config: DecoderConfig) -> CacheManager:
    return CacheManager(KVCache(config, 3, 600, step=256, device=device()))


def quantized(config: DecoderConfig) -> CacheManager:
    return CacheManager(KVCache(config, 3, 600, step=256, quantized=True, device=device()))


def paged(config: DecoderConfig) -> CacheManager:
    return BlockManager(PagedKVCache(config, 3, 600, blocks=500, block_size=4, device=device()))


@pytest.mark.parametrize(
    ("name", "manager"),
    [("gemma2", contiguous), ("alibi in windows", paged), ("llama", quantized), ("gated delta", paged)],
)
def test_graphs_of_all_lengths_give_the_logits_of_plain_steps(
    name: str, manager: Callable[[DecoderConfig], CacheManager]
):
    check_graphs(name, manager, fused=False)


@pytest.mark.long
def test_fused_steps_give_the_logits_of_plain_ones_and_are_compiled_as_a_whole():
    from torch._dynamo.utils import counters  # the import takes a second

    counters.clear()
    check_graphs("llama", contiguous, fused=True)
    assert counters["stats"]["calls_captured"]
    assert not counters["graph_break"]


def check_graphs(name: str, manager: Callable[[DecoderConfig], CacheManager], *, fused: bool) -> None:
    """Check decoding beyond the cache slots of the first graph."""
    torch.manual_seed(0)
    model = on_device(Decoder(replace(DECODERS[name], context_length=600)).eval())
    managers = [manager(model.config) for _ in range(2)]
    for each, row in product(managers, range(2)):
        each.allocate(row, [1] * 600, 600)
    cache, other = (each.cache for each in managers)
    step = GraphStep(model, (2, 1), fused=fused, capture=captured if device().type == "cuda" else repeated)
    with torch.inference_mode():
        for position in range(260):
            for each, row in product(managers, range(2)):
                each.reserve(row, position, position + 1)
            tokens = torch.randint(0, model.config.vocab_size, (2, 1), device=device())
            positions = torch.full((2, 1), position, device=device())
            plain = model(tokens, positions, other.view(0, 2))
            assert torch.allclose(step.run(tokens, positions, cache, position + 1), plain, atol=1e-5)
    assert sorted(step.graphs) == [(0, 256), (0, 512)]


def test_graphs_of_different_rows_are_apart() -> None:
    torch.manual_seed(0)
    model = on_device(Decoder(replace(DECODERS["llama"], context_length=600)).eval())
    cache, other = (contiguous(model.config).cache for _ in range(2))
    step = GraphStep(model, (1, 1), capture=captured if device().type == "cuda" else repeated)
    with torch.inference_mode():
        for position, first in product(range(3), (0, 2)):
            tokens = torch.randint(0, model.config.vocab_size, (1, 1), device=device())
            positions = torch.full((1, 1), position, device=device())
            plain = model(tokens, positions, other.view(first, first + 1))
            assert torch.allclose(step.run(tokens, positions, cache, position + 1, first), plain, atol=1e-5)
    assert sorted(step.graphs) == [(0, 256), (2, 256)]


class Reads(TorchDispatchMode):
    """Fails if the value of a tensor is read, which is impossible during a capture."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("name", [name for name, config in DECODERS.items() if "Experts" not in repr(config)])
def test_a_step_reads_no_value_of_a_tensor(name: str):
    model, cache = Decoder(DECODERS[name]).eval(), KVCache(DECODERS[name], 2, 12)
    tokens, positions = (torch.zeros(2, 1, dtype=torch.int64) for _ in range(2))
    with torch.inference_mode(), Reads():
        decoding_step(model, tokens, positions, cache.view(0, 2))


def answers(model: Decoder, compile_after: int | None, fused: bool = False) -> list[list[int]]:
    """An engine's answers to three requests with penalties."""
    engine = Engine(model, rows=3, compile_after=compile_after)
    assert not fused or not engine.compile(3)
    sampling = Sampling(temperature=0.7, top_k=20, repetition_penalty=1.1, frequency_penalty=0.1)
    requests = [Request([1, 2, 3 + i], sampling, max_new_tokens=280, seed=i) for i in range(3)]
    for request in requests:
        engine.add(request)
    for _ in engine.run():
        pass
    return [request.tokens for request in requests]


@CUDA
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_engine_gives_the_same_tokens_with_graphs(name: str):
    torch.manual_seed(0)
    model = on_device(Decoder(replace(DECODERS[name], context_length=300)).eval())
    plain = answers(model, None)
    assert answers(model, 0) == plain
    assert answers(model, None, fused=True) == plain


@CUDA
def test_a_step_waits_for_the_device_once(recwarn: pytest.WarningsRecorder):
    model = on_device(Decoder(replace(DECODERS["llama"], context_length=300)).eval())
    engine = Engine(model, rows=2, compile_after=4)
    sampling = Sampling(
        temperature=0.7, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, no_repeat_ngram_size=3
    )
    for seed in range(2):
        engine.add(Request([1, 2, 3], sampling, max_new_tokens=100, seed=seed))
    for _ in range(20):
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        recwarn.clear()
        for _ in range(10):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(warning.message) for warning in recwarn) == 10
