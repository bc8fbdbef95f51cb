"""Short prompts that compiled steps process give the hidden states and keys and values of plain steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from onward import BlockManager, CacheManager, Decoder, DecoderConfig, Engine, KVCache, PagedKVCache, Request, Sampling
from onward.compiled.interface import hidden_step
from onward.compiled.model_state import ModelState
from onward.compiled.needed import memory
from onward.compiled.program import Program
from onward.compiled.reuse import tensors_of
from onward.compiled.steps import POOLS, compile_step
from onward.generation.compiled_prompts import TILE
from onward.generation.runner import MAX_PROMPT, Runner

from support.adapters import stirred
from support.decoders import DECODERS, decoder

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # relative to the largest number
PLAIN = "indexers", "scaled turns", "own parts"  # steps that cannot be compiled, see test_program.py
STATES = "gated delta", "mamba2", "attention and mamba2", "short convolution"
ROWS, LENGTH, CHUNK = 4, 80, 24


def model_of(name: str) -> Decoder:
    return decoder(replace(DECODERS[name], context_length=LENGTH))


def contiguous(config: DecoderConfig, dtype: torch.dtype) -> CacheManager:
    return CacheManager(KVCache(config, ROWS, LENGTH, CHUNK, step=8, dtype=dtype))


def paged(config: DecoderConfig, dtype: torch.dtype) -> CacheManager:
    return BlockManager(PagedKVCache(config, ROWS, LENGTH, CHUNK, block_size=4, blocks=90, dtype=dtype))


def check_prompts(model: Decoder, manager: Callable[[DecoderConfig, torch.dtype], CacheManager], seed: int) -> None:
    """Prefill pieces of random lengths into random neighboring rows, by a runner that compiles at once and by a plain
    one."""
    random, managers = Random(seed), [manager(model.config, model.dtype) for _ in range(2)]
    compiled, plain = (Runner(model, managers[i].cache, ModelState(model), after) for i, after in enumerate((0, None)))
    ends = [0] * ROWS
    for each in managers:
        for row in range(ROWS):
            each.allocate(row, [1] * LENGTH, LENGTH)
    for _ in range(8):
        first = random.randrange(ROWS)
        rows = range(first, random.randint(first, ROWS - 1) + 1)
        pieces = [[random.randrange(model.config.vocab_size) for _ in range(random.randint(1, CHUNK))] for _ in rows]
        starts = [ends[row] if ends[row] + len(piece) <= LENGTH else 0 for row, piece in zip(rows, pieces)]
        for each in managers:
            for row, start, piece in zip(rows, starts, pieces):
                if not start:
                    each.free(row)
                    each.allocate(row, [1] * LENGTH, LENGTH)
                assert each.reserve(row, start, start + len(piece))
        found, expected = (runner.prefill(first, pieces, starts) for runner in (compiled, plain))
        for row, start, piece, ours, theirs in zip(rows, starts, pieces, found, expected):
            ends[row] = start + len(piece)
            count, width = len(piece), len(theirs)
            theirs = theirs[:count]
            assert (ours[:count] - theirs).abs().max() <= BOUND[model.dtype] * theirs.abs().max()
            if len(ours) > width:  # a compiled step, whose padding must write what the last token writes
                assert all(torch.equal(padding, ours[count - 1]) for padding in ours[count:])
        for row in range(ROWS):
            stored = [each.dump(row, ends[row]) for each in managers] if ends[row] else [{}, {}]
            for name, vectors in stored[1].items():
                assert (stored[0][name] - vectors).abs().max() <= BOUND[model.dtype] * vectors.abs().max()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in (*PLAIN, *STATES)])
@torch.inference_mode()
def test_compiled_prompts_equal_plain_ones(name: str, dtype: torch.dtype) -> None:
    model = model_of(name).to(dtype)
    for seed, manager in enumerate((contiguous, paged)):
        check_prompts(model, manager, seed)
    kinds = [shape for ((shape, _, step), *_) in POOLS[model].free if step is hidden_step]
    assert {rows * width <= MAX_PROMPT and width % TILE == 0 for rows, width in kinds} == {True}


@pytest.mark.parametrize("name", STATES)
def test_prompts_of_recurrent_models_are_not_padded(name: str) -> None:
    model = model_of(name)
    engine = Engine(model, rows=1, compile_after=0)
    engine.add(Request([1, 2, 3], Sampling(temperature=0), 4))
    engine.finish()
    assert {step is hidden_step for ((*_, step), *_) in POOLS[model].free} == {False}


def test_prompts_of_each_adapter_are_compiled_apart() -> None:
    model = stirred(model_of("llama"), "one", "two")
    found = []
    for compile_after in (None, 0):
        engine = Engine(model, rows=3, compile_after=compile_after)
        asked = [
            engine.add(Request([1, 2, 3 + i], Sampling(0), 6, adapter=a)) for i, a in enumerate(("one", "", "two"))
        ]
        engine.finish()
        found.append([request.tokens for request in asked])
    assert found[0] == found[1]
    assert {adapters for ((_, adapters, step), *_) in POOLS[model].free if step is hidden_step} != {("",)}


def test_prompts_are_compiled_after_plain_ones_of_their_length_or_ahead() -> None:
    model = model_of("llama")
    engine = Engine(model, rows=1, compile_after=2)
    programs = lambda: {shape for ((shape, _, step), *_) in POOLS[model].free if step is hidden_step}
    one, two = {(1, 16)}, {(1, 16), (1, 32)}
    for length, expected in (5, set()), (16, set()), (17, set()), (3, one), (32, one), (18, two):
        engine.add(Request([5] * length, Sampling(0), 1))
        engine.finish()
        assert (programs() if model in POOLS else set()) == expected
    other = model_of("llama")
    assert Engine(other, rows=2).compile(2) == ""
    ahead = {shape for ((shape, *_), *_) in POOLS[other].free}
    wide = {(2, width) for width in (32, 48, 64)}  # some CPUs have no kernel for so many rows
    assert ahead - wide == {(2, 1), (2, 16)}


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "deepseek"])
def test_the_blocks_of_a_model_compute_in_the_same_memory(name: str) -> None:
    sizes = []
    for n_layers in (3, 12):
        model = decoder(replace(DECODERS[name], n_layers=n_layers))
        program = compile_step(model, KVCache(model.config, 1, 16, 16), (1, 16), hidden_step)
        assert isinstance(program, Program)
        used = {s.data_ptr(): s for r in program.recording.records for s in map(Tensor.untyped_storage, tensors_of(r))}
        sizes.append(sum(used[address].nbytes() for address in used.keys() - memory(list(model.parameters()))))
    assert sizes[1] < 1.5 * sizes[0]
