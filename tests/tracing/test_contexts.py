"""Traces and edits belong to the context that opened them: a thread, or a task of asyncio."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward import Decoder, Engine, Request, Sampling
from onward.tracing import add, scale, zero
from onward.tracing.listening import is_traced
from onward.transforms import recompute_blocks

from support.decoders import DECODERS, decoder, token_ids

NAMES = "blocks.*.mid", "blocks.*.attn.k", "blocks.*.attn.weights", "blocks.*.mlp.shared.pre", "blocks.*.mlp.experts"
CALLS = 6


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Make threads switch after a few operations."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(works: list[Callable[[], Any]]) -> list[Any]:
    """The results of functions that start at the same time in separate threads."""
    barrier = Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(run, works))


@torch.no_grad()
def traced(model: Decoder, tokens: Tensor) -> Any:
    found = []
    for _ in range(CALLS):
        with onward.trace(model, *NAMES) as t:
            model(tokens)
        found.append(t)
    return found


@torch.no_grad()
def edited(model: Decoder, tokens: Tensor) -> list[Tensor]:
    with onward.edit(model, {"blocks.1.mid": scale(2.0), "blocks.2.mlp.experts": zero}):
        return [model(tokens) for _ in range(CALLS)]


@torch.no_grad()
def plain(model: Decoder, tokens: Tensor) -> list[Tensor]:
    return [model(tokens) for _ in range(CALLS)]


def test_threads_trace_and_edit_the_same_model_each_for_itself() -> None:
    model = decoder(DECODERS["deepseek"], torch.float64)
    texts = [token_ids(model.config, 2, length) for length in (3, 5, 7, 9, 11, 12)]
    traces = [traced(model, tokens)[0] for tokens in texts[:4]]
    wanted = edited(model, texts[4])[0], plain(model, texts[5])[0]
    *found, changed, same = together(
        [lambda tokens=tokens: traced(model, tokens) for tokens in texts[:4]]  # type: ignore[misc]
        + [lambda: edited(model, texts[4]), lambda: plain(model, texts[5])]
    )
    for mine, alone in zip(found, traces):
        for t in mine:
            assert len(t.calls) == 1
            for name, value in alone.call.activations.items():
                assert torch.equal(t[name], value), name
    assert all(torch.equal(logits, wanted[0]) for logits in changed)
    assert all(torch.equal(logits, wanted[1]) for logits in same)
    assert not is_traced(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_is_traced_in_the_context_of_the_trace_alone() -> None:
    model, seen = decoder(DECODERS["llama"]), list[bool]()
    with onward.edit(model, {"blocks.0": zero}):
        thread = Thread(target=lambda: seen.append(is_traced(model)))
        thread.start()
        thread.join()
        assert is_traced(model)
        assert copy_context().run(is_traced, model)
    assert seen == [False]
    assert not is_traced(model)


@pytest.mark.filterwarnings("ignore::onward.tracing.listening.Uncompiled")
def test_an_engine_in_another_thread_answers_without_the_edit() -> None:
    model = decoder(DECODERS["llama"])
    forced = torch.zeros(13)
    forced[7] = 1e4

    def answer() -> list[int]:
        engine = Engine(model)
        request = engine.add(Request([1, 2], Sampling(temperature=0), 8))
        list(engine.run())
        return request.tokens

    def answer_edited() -> list[int]:
        with onward.edit(model, {"logits": add(forced)}):
            return answer()

    alone = answer()
    assert together([answer, answer_edited, answer]) == [alone, [7] * 8, alone]


def test_calls_in_threads_with_a_copy_of_the_context_are_traced() -> None:
    model = decoder(DECODERS["deepseek"], torch.float64)
    texts = [token_ids(model.config, 1, length) for length in (3, 5, 7, 9)]
    wanted = {tokens.size(1): traced(model, tokens)[0] for tokens in texts}

    async def all_of_them() -> None:
        await asyncio.gather(*(asyncio.to_thread(torch.no_grad()(model), tokens) for tokens in texts))

    with onward.trace(model, *NAMES) as t:
        asyncio.run(all_of_them())
    assert sorted(call["blocks.0.mid"].size(1) for call in t.calls) == [3, 5, 7, 9]
    for call in t.calls:
        alone = wanted[call["blocks.0.mid"].size(1)].call
        assert all(torch.equal(call[name], value) for name, value in alone.activations.items())


def test_blocks_computed_again_in_a_thread_of_the_backward_are_edited_as_before() -> None:
    gradients = []
    for recompute in False, True:
        model = decoder(DECODERS["gpt-oss"], torch.float64)
        if recompute:
            recompute_blocks(model)
        changes = {"blocks.0.attn.heads.1": zero, "blocks.1.mlp.out": scale(3.0, at=[1, 4])}
        with onward.edit(model, changes), onward.trace(model, "blocks.0.mid") as t:
            loss = sum(model(token_ids(model.config, 2, length)).square().sum() for length in (12, 5))
            thread = Thread(target=loss.backward)  # type: ignore[union-attr]
            thread.start()
            thread.join()
        assert len(t.calls) == 2
        gradients.append([p.grad for p in model.parameters()])
    for plain_one, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain_one, recomputed)
