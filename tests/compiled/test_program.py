"""A compiled decoding step equals the plain one, for every kind of decoder that can be compiled."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

import onward
from onward import (
    BlockManager,
    CacheManager,
    Decoder,
    DecoderConfig,
    Engine,
    KVCache,
    LoRA,
    PagedKVCache,
    PiSSA,
    Request,
    Sampling,
    add_lora,
)
from onward.compiled import rows
from onward.compiled.interface import NotCompilable, decoding_step
from onward.compiled.steps import POOLS, StepPool, compile_step
from onward.families import read
from onward.model.adapters import selection
from onward.transforms.lora import adapters_of

from support.adapters import LORA, stirred
from support.decoders import DECODERS

REFUSED = {  # reasons why a step is not compiled
    "scaled turns": "pow with a tensor as its parameter",  # for RoPE scaling that depends on the length
    "indexers": "attention that reads the cache as a tensor",
    "own parts": "a layer that reads its states as tensors",
}
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # relative to the largest logit
LLAMA = replace(DECODERS["llama"], context_length=64)


def model_of(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config).to(dtype).eval()


def check_steps(config: DecoderConfig, dtype: torch.dtype, quantized: bool = False) -> None:
    """Compiled steps of three rows, with some tokens rolled back, equal plain steps."""
    model = model_of(config, dtype)
    caches = [KVCache(model.config, 3, 24, 3, keep=8, quantized=quantized, dtype=dtype) for _ in range(2)]
    programs = {width: compile_step(model, caches[0], (3, width)) for width in (1, 3)}
    steps = [*((n, 1) for n in range(7)), (7, 3), (10, 1), (10, 1), (8, 3), (5, 1), (6, 1)]
    with torch.inference_mode():
        for cache in caches:  # the second row is one token ahead
            model(torch.tensor([[1]]), torch.tensor([[0]]), cache.view(1, 2))
        for step, width in steps:
            tokens = torch.randint(0, model.config.vocab_size, (3, width))
            positions = torch.tensor([[step], [step + 1], [step]]) + torch.arange(width)
            logits = programs[width].run(tokens, positions, caches[0], 12)
            plain = model(tokens, positions, caches[1])
            assert (logits - plain).abs().max() <= BOUND[dtype] * plain.abs().max()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in REFUSED])
def test_compiled_steps_equal_plain_ones_and_rows_do_not_meet(name: str, dtype: torch.dtype):
    check_steps(DECODERS[name], dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.bfloat16), *((name, torch.float32) for name in ("gemma2", "alibi in windows", "deepseek"))],
)
def test_compiled_steps_with_a_quantized_cache_equal_plain_ones(name: str, dtype: torch.dtype):
    check_steps(DECODERS[name], dtype, quantized=True)


@pytest.mark.parametrize("dtype", BOUND)
def test_compiled_steps_of_llama4_equal_plain_ones(dtype: torch.dtype):
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 24, "intermediate_size_mlp": 40, "head_dim": 8}
    counts = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    hf = {"model_type": "llama4_text", **sizes, **counts, "num_experts_per_tok": 2, "attention_chunk_size": 5}
    check_steps(read(hf)[1], dtype)


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_cannot_be_compiled_names_the_operation(name: str):
    model = model_of(DECODERS[name])
    with pytest.raises(NotCompilable, match=REFUSED[name]):
        compile_step(model, KVCache(model.config, 1, 8), (1, 1))


def answers(
    model: Decoder, compile_after: int | None, seeds: int = 5, adapters: Sequence[str | None] = (None,)
) -> list[list[int]]:
    """The answers of an engine with three rows to requests of several lengths and options, which use `adapters` in
    turn."""
    engine = Engine(model, rows=3, compile_after=compile_after)
    requests = [
        Request(
            [1 + n % 11 for n in range(1 + 3 * i)],
            Sampling(temperature=i % 2),
            max_new_tokens=10 + 4 * i,
            seed=i,
            adapter=adapters[i % len(adapters)],
        )
        for i in range(seeds)
    ]
    for request in requests:
        engine.add(request)
    for _ in engine.run():
        pass
    return [request.tokens for request in requests]


def num_programs(model: Decoder) -> int:
    """The number of a model's programs for decoding steps that no engine is using."""
    return sum(len(free) for ((*_, step), *_), free in POOLS[model].free.items() if step is decoding_step)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt-oss", "deepseek"])
def test_engine_gives_the_same_tokens_compiled_or_not(name: str):
    model = model_of(replace(DECODERS[name], context_length=300))  # long enough for the cache to grow
    plain = answers(model, None)
    assert answers(model, 0) == plain
    assert num_programs(model) == 3, "a program for each number of rows"
    assert answers(model, 0) == plain, "and again, with the existing programs"
    assert num_programs(model) == 3


ADAPTERS = {  # settings of the model's adapters, and the adapters that requests use
    "one of two": (LORA, ("one",)),
    "two and none": (LORA, ("one", None, "", "two")),
    "dora": (LoRA(rank=3, targets=("blocks",), dora=True), ("two", "one")),
    "of attention": (LoRA(rank=2, targets=("attn.q", "attn.out")), ("one", "")),
    "pissa": (LoRA(rank=2, targets=("mlp",), init=PiSSA()), ("one",)),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *product(["llama", "gpt2"], ["one of two", "two and none", "dora"]),
        ("llama", "pissa"),
        ("gpt-oss", "of attention"),
        ("deepseek", "of attention"),
    ],
)
def test_engine_with_adapters_gives_the_same_tokens_compiled_or_not(name: str, case: str):
    lora, used = ADAPTERS[case]
    model = stirred(model_of(replace(DECODERS[name], context_length=64)), "one", "two", lora=lora)
    for changed in False, True:
        plain = answers(model, None, adapters=used)
        assert answers(model, 0, adapters=used) == plain
        assert num_programs(model) >= 3
        assert changed or plain != answers(model, None, adapters=[""])
        for _, _, adapter in adapters_of(model, "one"):
            adapter.b.data.mul_(2) if case == "pissa" else torch.no_grad()(adapter.b.mul_)(-3)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("names", [["two"] * 3, ["two", "", "one"]], ids=" ".join)
def test_compiled_steps_with_adapters_equal_plain_ones(names: list[str], dtype: torch.dtype):
    model = stirred(model_of(LLAMA, dtype), "one", "two", lora=replace(LORA, dora=True))
    caches = [KVCache(LLAMA, 3, 24, 3, dtype=dtype) for _ in range(2)]
    chosen = selection(model)
    with chosen.use(names):
        program = compile_step(model, caches[0], (3, 2))
    with torch.inference_mode():
        for step in range(0, 12, 2):
            names = names[1:] + names[:1]  # rows use other adapters than when the step was compiled
            tokens, positions = torch.randint(0, LLAMA.vocab_size, (3, 2)), step + torch.arange(2).expand(3, -1)
            with chosen.use(names):
                logits, plain = program.run(tokens, positions, caches[0], 24), model(tokens, positions, caches[1])
            assert (logits - plain).abs().max() <= 2 * BOUND[dtype] * plain.abs().max()


def test_steps_that_an_adapter_keeps_plain_leave_those_of_the_base_compiled():
    model = model_of(LLAMA)
    add_lora(model, LoRA(rank=2, targets=("attn",), tokens=(1, 2)), "one")
    for adapters in ["one"], [""]:
        assert answers(model, 0, adapters=adapters) == answers(model, None, adapters=adapters)
    assert {adapters for adapters, _ in POOLS[model].refusals} == {("one",)}
    assert num_programs(model) == 3


def test_compiled_steps_of_many_adapters_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("onward.compiled.steps.MAX_STEPS", 2)
    model = stirred(model_of(LLAMA), "one", "two")
    for adapters in ["one", "two", ""], ["one"]:
        assert answers(model, 0, adapters=adapters) == answers(model, None, adapters=adapters)
        assert sum(map(len, POOLS[model].free.values())) == 2


def paged(config: DecoderConfig) -> CacheManager:
    return BlockManager(PagedKVCache(config, 2, 64, 8, block_size=4, blocks=60))


def quantized(config: DecoderConfig) -> CacheManager:
    return CacheManager(KVCache(config, 2, 64, 8, quantized=True))


def quantized_and_paged(config: DecoderConfig) -> CacheManager:
    return BlockManager(PagedKVCache(config, 2, 64, 8, block_size=4, blocks=60, quantized=True))


def in_another_dtype(config: DecoderConfig) -> CacheManager:
    return CacheManager(KVCache(config, 2, 64, 8, quantized=True, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "cache", "compiled"),
    [
        *((name, paged, 2) for name in ("llama", "gemma2", "no-output", "deepseek")),
        *((name, quantized, 2) for name in ("llama", "gemma2", "deepseek")),
        ("gemma2", quantized_and_paged, 2),
        ("llama", in_another_dtype, 0),
    ],
)
def test_engine_with_a_cache_gives_the_same_tokens_compiled_or_not(
    name: str, cache: Callable[[DecoderConfig], CacheManager], compiled: int
):
    model = model_of(replace(DECODERS[name], context_length=64))
    answers(model, 0)  # compiles programs for a contiguous cache, which must not be used
    before = num_programs(model)
    given = []
    for compile_after in 0, None:
        engine = Engine(model, rows=2, cache=cache(model.config), compile_after=compile_after)
        requests = [Request([1 + n % 9 for n in range(size)], Sampling(), 30, seed=size) for size in (3, 8, 5)]
        for request in requests:
            engine.add(request)
        list(engine.run())
        given.append([request.tokens for request in requests])
    assert given[0] == given[1]
    assert num_programs(model) == before + compiled


def test_program_reads_weights_that_change_in_place_and_is_dropped_when_they_are_replaced():
    model = model_of(LLAMA)
    before = answers(model, 0)
    with torch.no_grad():
        model.blocks[0].mlp.down.weight.mul_(-30)
    changed = answers(model, 0)
    assert changed == answers(model, None) != before
    model.blocks[0].mlp.down.weight = torch.nn.Parameter(-model.blocks[0].mlp.down.weight)
    assert answers(model, 0) == answers(model, None) != changed


def test_hooks_see_every_step():
    model, calls = model_of(LLAMA), []
    answers(model, 0)
    hook = model.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    answers(model, 0, seeds=1)
    assert len(calls) == 10  # one prefill and nine decoding steps
    hook.remove()
    answers(model, 0, seeds=1)
    assert len(calls) == 10


def test_traced_decoding_takes_plain_steps_and_says_so():
    model = model_of(LLAMA)
    plain = answers(model, 0)
    with (
        pytest.warns(UserWarning, match="not compiled while the model"),
        onward.trace(model, "blocks.0") as t,
    ):
        assert answers(model, 0) == plain
    assert len(t.calls) >= 10  # every step


def test_too_many_rows_of_a_step_do_not_refuse_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "max_rows", lambda dtype: 32)
    config, pool = DECODERS["scaled turns"], StepPool()
    assert pool.acquire(model_of(LLAMA), KVCache(LLAMA, 40, 8), ((40, 1), ("",), decoding_step)) is None
    assert pool.acquire(model_of(LLAMA), KVCache(LLAMA, 1, 8), ((1, 1), ("",), decoding_step)) is not None
    assert pool.acquire(model_of(config), KVCache(config, 1, 8), ((1, 1), ("",), decoding_step)) is None
    assert REFUSED["scaled turns"] in pool.refusals[("",), decoding_step]
