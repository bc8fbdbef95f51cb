"""The adapter that a model uses is chosen per thread and per task, and its backward pass uses the same adapter."""

import asyncio
import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor

from onward import Decoder, LoRA, UserError, add_lora, remove_lora, use_adapter
from onward.transforms import compile_blocks, recompute_blocks

from support.adapters import stirred
from support.decoders import DECODERS, assert_close, decoder, token_ids

NAMES = "one", "two", ""
LLAMA = DECODERS["llama"]


def adapted_model(dtype: torch.dtype = torch.float64) -> Decoder:
    return stirred(decoder(LLAMA, dtype), "one", "two", lora=LoRA(rank=2))


@torch.no_grad()
def outputs(model: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    """The logits of a model with each of its adapters."""
    result = {}
    for name in NAMES:
        with use_adapter(model, name):
            result[name] = model(tokens)
    return result


def in_threads(model: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    """The logits with each adapter, from threads that have all chosen their adapter before one calls the model."""
    chosen, result = Barrier(len(NAMES)), dict[str, Tensor]()

    def run(name: str) -> None:
        with use_adapter(model, name), torch.no_grad():
            chosen.wait()
            result[name] = model(tokens)
            chosen.wait()

    threads = [Thread(target=run, args=[name]) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result


def in_tasks(model: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    """The logits with each adapter, from tasks that have all chosen their adapter before one calls the model."""

    async def run(name: str, chosen: asyncio.Barrier) -> Tensor:
        with use_adapter(model, name):
            await chosen.wait()
            return model(tokens).detach()

    async def run_all() -> list[Tensor]:
        chosen = asyncio.Barrier(len(NAMES))
        return await asyncio.gather(*(run(name, chosen) for name in NAMES))

    return dict(zip(NAMES, asyncio.run(run_all())))


def test_a_generator_may_choose_and_end_in_different_contexts() -> None:
    model = adapted_model()

    def pieces() -> Iterator[int]:
        with use_adapter(model, "one"):
            yield 1

    running = pieces()
    assert [copy_context().run(next, running, None) for _ in range(2)] == [1, None]


@pytest.mark.parametrize("run", [in_threads, in_tasks])
def test_threads_and_tasks_choose_their_own_adapters(run: Callable[[Decoder, Tensor], dict[str, Tensor]]) -> None:
    model, tokens = adapted_model(), token_ids(LLAMA)
    alone, together = outputs(model, tokens), run(model, tokens)
    for name in NAMES:
        assert_close(together[name], alone[name])
    with torch.no_grad():
        assert_close(model(tokens), alone["two"])


@pytest.mark.parametrize("run", [in_threads, in_tasks])
def test_compiled_blocks_use_the_adapters_of_their_thread_or_task(
    run: Callable[[Decoder, Tensor], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = adapted_model(), token_ids(LLAMA)
    alone = outputs(model, tokens)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling would take seconds
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compile_blocks(model)
    together = run(model, tokens)
    for name in NAMES:
        assert_close(together[name], alone[name])


def test_adapter_that_is_removed_while_another_is_in_use_is_not_used_again() -> None:
    model = adapted_model()
    with use_adapter(model, "one"):
        remove_lora(model, "two")
    add_lora(model, LoRA(rank=2, targets=("attn.q",)), "three")
    remove_lora(model, "three")
    stirred(model, "two", lora=LoRA(rank=2))
    remove_lora(model, "two")
    tokens = token_ids(LLAMA)
    with use_adapter(model, ""), torch.no_grad():
        plain = model(tokens)
    assert torch.equal(model(tokens), plain)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [("one", None), (["two", "one"], None), (None, "one"), ("one", ["two", ""])],
    ids=str,
)
def test_recomputation_uses_the_adapters_of_the_forward_pass(
    forward: str | Sequence[str] | None, backward: str | Sequence[str] | None
) -> None:
    tokens = token_ids(LLAMA)

    def gradients(recompute: bool) -> dict[str, Tensor]:
        model = adapted_model().requires_grad_(True)
        used = lambda names: nullcontext() if names is None else use_adapter(model, names)
        if recompute:
            recompute_blocks(model)
        with used(forward):
            loss = model(tokens).square().mean()
        with used(backward):
            loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, recomputed = gradients(False), gradients(True)
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        assert torch.equal(recomputed[name], gradient)


@torch.no_grad()
def test_copies_and_pickles_made_amid_a_choice_use_the_default() -> None:
    model, tokens = adapted_model(), token_ids(LLAMA)
    alone = outputs(model, tokens)
    with use_adapter(model, "one"):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for each in copies:
            assert torch.equal(each(tokens), alone["two"])
    for each in copies:
        assert all(torch.equal(result, alone[name]) for name, result in outputs(each, tokens).items())


@pytest.mark.parametrize("names", [["one"], ["one", "one"], ["one", ""], ["", "one", "two"], ["one", "", "", "", ""]])
def test_another_number_of_adapters_than_rows_is_refused(names: list[str]) -> None:
    model, tokens = adapted_model(), token_ids(LLAMA, rows=4)
    remove_lora(model, "two")
    add_lora(model, LoRA(rank=2, targets=("embed",)), "two")
    for lora in LoRA(rank=2, targets=("embed",)), LoRA(rank=2):
        refused = f"^Cannot use a list of {len(names)} adapter names? for a batch of size 4: name"
        with use_adapter(model, names), pytest.raises(UserError, match=refused):
            model(tokens)
        remove_lora(model, "two")
        stirred(model, "two", lora=lora)
    with use_adapter(model, ["two", "", "one", "one"]):
        model(tokens)


def test_empty_list_of_adapters_is_refused() -> None:
    with pytest.raises(UserError, match=r"^Cannot use an empty list of adapters: name the adapter of each row$"):
        use_adapter(adapted_model(), [])
