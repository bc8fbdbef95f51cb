"""Models that are edited between and during answers: compiled steps and cached prompts never use outdated weights."""

import gc
import random
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import onward
from onward import BlockManager, Decoder, Engine, KVCache, LoRA, PagedKVCache, Request, Sampling
from onward.compiled.fingerprint import Snapshot, checksum, fingerprint
from onward.compiled.model_state import ModelState
from onward.generation import PrefixFiles
from onward.generation.cache.conversation import ConversationCache

from support.adapters import stirred
from support.decoders import DECODERS, decoder
from support.edits import EDITS, ONCE
from support.reading import tokens_read

CONFIG = replace(DECODERS["llama"], n_heads=2, n_kv_heads=2, d_head=0, context_length=64)
PROMPT = [1 + n % 11 for n in range(9)]
Kept = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore::onward.tracing.listening.Uncompiled")


def model_of() -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIG).eval()


def answer(
    model: Decoder,
    compile_after: int | None = None,
    edit: Callable[[], object] = lambda: None,
    at: int = -1,
    new: int = 12,
    prompt: list[int] = PROMPT,
    **kept: Any,
) -> list[tuple[int, float]]:
    """The tokens of a greedy answer and their log-probabilities; `edit()` is called after step `at`."""
    engine = Engine(model, compile_after=compile_after, **({"rows": 2} | kept))
    request = engine.add(Request(list(prompt), Sampling(temperature=0), new, num_logprobs=0))
    step = 0
    while engine.busy:
        engine.step()
        if step == at:
            edit()
        step += 1
    assert not request.error, request.error
    return [(one.token, one.logprob) for one in request.logprobs]


def same(a: list[tuple[int, float]], b: list[tuple[int, float]], bound: float = 1e-3) -> bool:
    return len(a) == len(b) and all(x[0] == y[0] and abs(x[1] - y[1]) < bound for x, y in zip(a, b))


FEW = "data.mul_", "load_state_dict with assign", "another block", "eps", "hook"
LATER = [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in EDITS]


@pytest.mark.parametrize("name", LATER)
def test_compiled_and_plain_steps_agree_after_and_amid_an_edit(name: str) -> None:
    models = [model_of() for _ in range(2)]
    for model, compile_after in zip(models, (None, 0)):
        answer(model, compile_after)
    unedited, during, after = answer(models[0]), [], []
    for model, compile_after in zip(models, (None, 0)):
        with ExitStack() as stack:
            during.append(answer(model, compile_after, partial(EDITS[name], model, stack), at=4))
            gc.collect()
            after.append(answer(model, compile_after))
        assert same(answer(model, compile_after), answer(model)), "also after the edit is undone"
    assert same(during[0], during[1])
    assert same(after[0], after[1])
    assert not same(unedited, after[0], 0), "the edit changes the answer"


@pytest.mark.parametrize("name", ["eps", "hook", "another block", "adapters"])
def test_a_function_of_a_request_may_edit_the_model_while_an_engine_finishes(name: str) -> None:
    def edited(compile_after: int | None) -> list[tuple[int, float]]:
        model, tokens = model_of(), list[int]()

        def stop(token: int) -> bool:
            tokens.append(token)
            if len(tokens) == 5:
                EDITS[name](model, stack)
            return False

        with ExitStack() as stack:
            engine = Engine(model, rows=2, compile_after=compile_after)
            request = engine.add(Request(list(PROMPT), Sampling(temperature=0), 12, stop, num_logprobs=0))
            engine.finish()
        return [(one.token, one.logprob) for one in request.logprobs]

    plain, compiled = edited(None), edited(0)
    assert same(plain, compiled)
    assert not same(plain, answer(model_of()), 0), "the edit changes the answer"


def test_engine_compares_the_model_with_itself_only_after_code_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compared, holds = model_of(), list[int](), Snapshot.holds
    monkeypatch.setattr(Snapshot, "holds", lambda self: compared.append(1) or holds(self))
    for calls_user, compile_after, times in (False, None, 0), (True, None, 0), (False, 0, 0), (True, 0, 11):
        engine = Engine(model, compile_after=compile_after)
        engine.add(Request(list(PROMPT), Sampling(temperature=0), 12, calls_user=calls_user))
        compared.clear()
        engine.finish()
        assert len(compared) == times


def blocks(model: Decoder, folder: Path) -> Kept:
    return {"cache": BlockManager(PagedKVCache(CONFIG, 2, 64, 16, block_size=2, blocks=70))}


def conversation(model: Decoder, folder: Path) -> Kept:
    return {"cache": ConversationCache(KVCache(CONFIG, 1, 64, 16)), "rows": 1}


def files(model: Decoder, folder: Path) -> Kept:
    return {"files": PrefixFiles(folder, model)}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("kind", [blocks, conversation, files])
def test_prompts_are_reused_only_by_the_model_that_read_them(
    kind: Callable[[Decoder, Path], Kept], name: str, tmp_path: Path
) -> None:
    model, new = model_of(), 5
    kept = kind(model, tmp_path)
    before = answer(model, new=new, **kept)
    with ExitStack() as stack:
        EDITS[name](model, stack)
        edited = answer(model, new=new, rows=1)
        assert not same(edited, before, 0)
        assert same(answer(model, new=new, **kept), edited)
        assert same(answer(model, new=new, **kept), edited)
    assert same(answer(model, new=new, **kept), answer(model, new=new, rows=1))


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("kind", [blocks, conversation, files])
def test_prompts_read_amid_an_edit_are_not_reused(
    kind: Callable[[Decoder, Path], Kept], name: str, tmp_path: Path
) -> None:
    model, new = model_of(), 5
    kept = kind(model, tmp_path)
    with ExitStack() as stack:
        given = answer(model, None, partial(EDITS[name], model, stack), 2, new, **kept)
        longer = [*PROMPT, *(token for token, _ in given), 3]
        plain = answer(model, new=new, prompt=longer, rows=1)
        assert same(answer(model, new=new, prompt=longer, **kept), plain)
    assert same(answer(model, new=new, prompt=longer, **kept), answer(model, new=new, prompt=longer, rows=1))


@pytest.mark.parametrize("kind", [blocks, conversation, files])
def test_prompts_of_an_unchanged_model_are_reused(
    kind: Callable[[Decoder, Path], Kept], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    kept, read = kind(model, tmp_path), tokens_read(monkeypatch)
    for size in len(PROMPT), 1:
        read.clear()
        answer(model, new=1, **kept)
        assert read[0] == size
    with model.blocks[0].register_forward_hook(lambda *_: None):
        written = list(tmp_path.iterdir())
        answer(model, new=1, prompt=[*PROMPT, 5], **kept)
        assert list(tmp_path.iterdir()) == written
        read.clear()
        answer(model, new=1, prompt=[*PROMPT, 5], **kept)
        assert read[0] == len(PROMPT) + 1


def test_owned_model_is_read_once_and_its_hooks_and_counted_changes_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, read = model_of(), list[int]()
    engine = Engine(model, compile_after=0, **blocks(model, tmp_path))
    engine.state.owned = True
    monkeypatch.setattr("onward.compiled.fingerprint.checksum", lambda tensor: read.append(1) or checksum(tensor))

    def ask() -> list[tuple[int, float]]:
        request = engine.add(Request(list(PROMPT), Sampling(temperature=0), 12, num_logprobs=0))
        assert list(engine.run())
        return [(one.token, one.logprob) for one in request.logprobs]

    before = ask()
    assert len(read) == len(model.state_dict())
    assert same(ask(), before)
    assert len(read) == len(model.state_dict())
    for name in "hook", "mul_":
        with ExitStack() as stack:
            EDITS[name](model, stack)
            assert same(ask(), edited := answer(model))
            assert not same(edited, before, 0)
        assert same(ask(), answer(model))


def test_file_that_cannot_be_written_is_a_warning_not_an_error_of_the_request(tmp_path: Path) -> None:
    model = model_of()
    files = PrefixFiles(tmp_path / "file", model)
    files.folder.rmdir()
    files.folder.write_text("")
    with pytest.warns(UserWarning, match="the prompt is not saved: cannot write"):
        found = answer(model, files=files)
    assert same(found, answer(model))


def test_name_of_a_model_is_that_of_its_copies_and_of_equal_models() -> None:
    model = model_of()
    names = {fingerprint(model), fingerprint(model_of()), fingerprint(deepcopy(model))}
    assert len(names) == 1
    with onward.edit(model, {"blocks.0": 0.0}):
        assert fingerprint(model) is None
    model.blocks[1].attn_norm.eps = 0.5
    assert fingerprint(model) not in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_checksum_sees_every_number_and_its_place(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    numbers = torch.randint(-100, 100, (300, 301)).to(dtype)
    found = {checksum(numbers)}
    for changed in numbers.flip(0), numbers.flip(1), numbers.roll(64, 1), numbers.roll(8, 0):
        found.add(checksum(changed))
    for place in 0, 7, 40_000, -1:
        other = numbers.clone()
        other.view(-1)[place] += 1
        found.add(checksum(other))
    assert len(found) == 9
    assert checksum(numbers.clone()) in found


def test_pool_of_programs_keeps_neither_model_nor_replaced_weights() -> None:
    model = model_of()
    answer(model, 0)
    block, weak = ref(model.blocks[0].attn_norm), ref(model)
    model.blocks[0].attn_norm = torch.nn.Identity()
    gc.collect()
    assert block() is None
    del model
    gc.collect()
    assert weak() is None


@pytest.mark.fuzzer
@pytest.mark.parametrize("cases", [1, pytest.param(40, marks=pytest.mark.long)])
def test_random_edits_between_and_during_answers_are_never_missed(cases: int, tmp_path: Path) -> None:
    for seed in range(cases):
        edited_at_random(seed, tmp_path / str(seed))


def edited_at_random(seed: int, folder: Path) -> None:
    """Caches and compiled steps are kept through all edits; answers must equal those of a plain engine without them."""
    draw, model = random.Random(seed), model_of()
    kept: list[Kept] = [make(model, folder) for make in (blocks, conversation, files)]
    memory = {name: EDITS[name] for name in EDITS if name not in ("adapters", "a block less")}
    with ExitStack() as stack:
        for _ in range(5):
            name, prompt = draw.choice(list(memory)), PROMPT[: draw.randint(2, len(PROMPT))]
            if draw.random() < 0.5:
                if draw.random() < 0.5:
                    answer(model, 0, partial(EDITS[name], model, stack), draw.randint(0, 4), **draw.choice(kept))
                else:
                    EDITS[name](model, stack)
                memory = {one: edit for one, edit in memory.items() if one != name and one not in ONCE}
            if draw.random() < 0.3:
                stack.close()
            right = answer(model, None, prompt=prompt, rows=1, new=6)
            for one in kept:
                assert same(answer(model, draw.choice([0, None]), prompt=prompt, new=6, **one), right), name


def test_method_that_nothing_calls_keeps_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers adds such a method to torch.nn.Module while it loads a model."""
    model = decoder(DECODERS["llama"])
    monkeypatch.setattr(nn.Module, "smart_apply", lambda self, function: self.smart_apply(function), raising=False)
    assert Snapshot(model).compilable
    monkeypatch.setattr(nn.Module, "_call_impl", lambda self, *args: self.forward(*args))
    assert not Snapshot(model).compilable


@torch.no_grad()
def test_compiled_steps_are_used_only_while_the_weights_that_dora_scales_are_the_same() -> None:
    model = stirred(decoder(DECODERS["llama"]), "one", lora=LoRA(rank=2, targets=("attn.q",), dora=True))
    state, weight = ModelState(model), model.blocks[0].attn.q.weight
    assert state.follow().compilable
    before, state.confirmed = state.key, False
    weight.mul_(2)
    state.follow()
    assert state.key != before
    with torch.inference_mode():
        model.blocks[0].attn.q.weight = torch.nn.Parameter(weight.clone())  # which does not count its changes
    assert not ModelState(model).follow().compilable
