"""The steps of an engine: the tokens that they prefill and decode, the lists that they copy, and the order of
prompts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onward import (
    BlockManager,
    CacheManager,
    Decoder,
    DecoderConfig,
    Engine,
    KVCache,
    PagedKVCache,
    Request,
    Sampling,
)
from onward.generation import PrefixFiles
from onward.generation.cache.conversation import ConversationCache
from onward.generation.runner import Runner

from support.plain_generation import CONFIGS, DRAFTS, GREEDY, MODELS, PROMPTS, WARM, decoder, plainly, run
from support.reading import tokens_read


@pytest.mark.parametrize(("size", "read"), [(16, 16 + 3), (15, 4 * 15)])
def test_samples_of_one_prompt_share_its_prefill_unless_it_is_short(
    size: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = MODELS["rotary"], tokens_read(monkeypatch)
    samples = [Request([1 + n % 9 for n in range(size)], WARM, 6, seed=i) for i in range(4)]
    run(model, samples, compile_after=None)  # `tokens_read` does not see compiled steps
    assert sum(calls) == read + 4 * 5
    assert [r.tokens for r in samples] == [plainly(model, r) for r in samples]


@pytest.mark.parametrize("kind", CONFIGS)
def test_prompt_on_disk_is_not_read_again_and_changes_no_token(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[kind]
    Engine(model)  # the first engine tests custom parts, before calls are counted
    read = tokens_read(monkeypatch)
    longer, found = [*PROMPTS[1], 3, 8], 6 if kind == "recurrent" else 7  # tokens up to the last snapshot, or all
    for prompt, new in (PROMPTS[1], 7), (PROMPTS[1], 1), (longer, 9 - found), (longer, 1):
        read.clear()
        request = Request(prompt, WARM, 5)
        run(model, [request], files=PrefixFiles(tmp_path, model), compile_after=None)
        assert sum(read) == new + 4
        assert request.tokens == plainly(model, request)


def test_decoding_feeds_the_tokens_on_the_device() -> None:
    model = MODELS["rotary"]
    engine, requests = Engine(model), [Request(p, WARM, 12, seed=i) for i, p in enumerate(PROMPTS)]
    followed: list[bool] = []
    follows = engine.runner.follows
    engine.runner.follows = lambda *args: followed.append(follows(*args)) or followed[-1]  # type: ignore[method-assign, func-returns-value]
    for request in requests:
        engine.add(request)
    list(engine.run())
    assert followed.count(True) >= 8
    assert [r.tokens for r in requests] == [plainly(model, r) for r in requests]


def test_step_leaves_a_model_in_evaluation_mode_alone() -> None:
    model, switched = decoder(), list[bool]()
    model.blocks[0].train = lambda mode=True: switched.append(mode)  # type: ignore[method-assign, assignment]
    run(model, [Request([1, 2], GREEDY, 5)])
    assert not switched


class Watched(list[int]):
    """A list that counts the elements copied from it."""

    copied = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Watched.copied += len(found) if isinstance(index, slice) else 0
        return found

    def __iter__(self) -> Iterator[int]:
        Watched.copied += len(self)
        return super().__iter__()

    def __add__(self, other: Any) -> Any:
        Watched.copied += len(self) + len(other)
        return super().__add__(other)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("draft", DRAFTS)
def test_decoding_step_copies_no_context(draft: str, paged: bool) -> None:
    model = decoder(context_length=128)
    penalties = Sampling(1.3, repetition_penalty=1.1, frequency_penalty=0.1, no_repeat_ngram_size=3)
    blocks = lambda: BlockManager(PagedKVCache(model.config, 3, 128, 32, blocks=60, block_size=4))
    engine = Engine(model, cache=blocks() if paged else None, draft=DRAFTS[draft]())
    for seed in range(3):
        request = Request([(seed + i * i) % 50 for i in range(40)], penalties, 60, seed=seed)
        request.prompt, request.tokens = Watched(request.prompt), Watched()
        engine.add(request)
    for _ in range(9):  # prefill, and index lists that are built once
        engine.step()
    Watched.copied = 0
    new = sum(len(engine.step()) for _ in range(5))
    assert new >= 15
    assert Watched.copied <= 8 * new  # only a few recent tokens, never a whole context of more than 40 tokens


def test_runner_reuses_views_of_a_growing_cache() -> None:
    engine, lengths = Engine(decoder(context_length=300), rows=1, compile_after=None), list[int]()
    cache = engine.runner.cache
    view = cache.view
    cache.view = lambda *key: lengths.append(key[-1]) or view(*key)  # type: ignore[method-assign, func-returns-value, assignment]
    request = engine.add(Request([1], GREEDY, 290))
    for _ in engine.run():
        pass
    assert len(request.tokens) == 290
    assert lengths == [64, 128, 192, 256, 256, 320]  # the cache grows beyond 256


def test_a_row_never_continues_with_a_token_that_was_sampled_for_another() -> None:
    model = Decoder(DecoderConfig(vocab_size=16, d_model=16, n_layers=1, n_heads=2, context_length=16)).eval()
    runner = Runner(model, KVCache(model.config, 1, 16), None)
    alone, other = (Request([token], Sampling(temperature=0), 5) for token in (1, 2))
    runner.decode([alone])
    alone.tokens.append(3)
    alone.num_cached += 1
    runner.keep([other], torch.tensor([7]))
    assert not runner.follows([alone], [alone.num_cached])
    runner.keep([alone], torch.tensor([3]))
    assert runner.follows([alone], [alone.num_cached])


@pytest.mark.parametrize("budget", [1, 3, None])
def test_prompts_are_prefilled_in_the_order_of_arrival(budget: int | None) -> None:
    """The order of arrival is kept even while rows become free, so that no later prompt delays earlier ones."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=50, d_model=16, n_layers=1, n_heads=2, context_length=32))
    engine = Engine(model, rows=4, prefill_budget=budget)
    requests = [Request([i + 1] * 6, Sampling(temperature=0.0), 1 + i % 4) for i in range(24)]
    for request in requests:
        engine.add(request)
    first = list(dict.fromkeys(request.arrival for request, _ in engine.run()))
    assert first == sorted(first)


CACHES: dict[str, Callable[[DecoderConfig], CacheManager]] = {
    "one row": lambda config: CacheManager(KVCache(config, 1, 24, 16, dtype=torch.float64)),
    "three rows": lambda config: CacheManager(KVCache(config, 3, 24, 16, step=8, dtype=torch.float64)),
    "conversation": lambda config: ConversationCache(KVCache(config, 1, 24, 16, dtype=torch.float64)),
    "paged": lambda config: BlockManager(PagedKVCache(config, 3, 24, 16, blocks=18, block_size=4, dtype=torch.float64)),
}


@pytest.mark.parametrize("draft", ["no draft", "look-up"])
@pytest.mark.parametrize("kind", ["rotary", "windows"])
@pytest.mark.parametrize("name", CACHES)
def test_nan_of_an_earlier_answer_reaches_no_later_one(name: str, kind: str, draft: str) -> None:
    model = decoder(kind).double()  # no kernel supports fp64, so all slots of a view are read
    manager = CACHES[name](model.config)
    engine = Engine(model, cache=manager, draft=DRAFTS[draft](), compile_after=None)
    for new in 16, 4, 9:
        requests = [Request([new, *prompt], GREEDY, new) for prompt in PROMPTS]
        for request in requests:
            engine.add(request)
        engine.finish()
        assert [r.tokens for r in requests] == [plainly(model, r) for r in requests]
        for layer in manager.cache.layers:
            for entry in layer.entries.values():
                entry[entry != 0] = torch.nan
