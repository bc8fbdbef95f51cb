"""Prefixes of models with recurrent layers are shared only at positions where a snapshot of the states was taken."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from onward import BlockManager, CacheManager, Decoder, Engine, KVCache, PagedKVCache, Request, SelfAttention, UserError
from onward.config.decoder import each
from onward.generation import LookupDraft
from onward.generation.cache.conversation import ConversationCache
from onward.generation.cache.state_prefixes import SNAPSHOTS, Snapshots, StatePrefixCache

from support.decoders import DECODERS
from support.devices import device
from support.plain_generation import GREEDY, MODELS, decoder, plainly, run
from support.reading import tokens_read

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
CACHES: dict[str, Callable[[Decoder], CacheManager]] = {
    "contiguous": lambda model: CacheManager(KVCache(model.config, 4, 24, 24, device=device())),
    "paged": lambda model: BlockManager(
        PagedKVCache(model.config, 4, 24, 24, blocks=40, block_size=4, device=device())
    ),
    "conversation": lambda model: ConversationCache(KVCache(model.config, 1, 24, 24, device=device())),
}
MIXERS: dict[str, Any] = {
    "recurrent": MODELS["recurrent"].config.attention,
    "gated delta": DECODERS["gated delta"].attention,
    "mamba2": DECODERS["mamba2"].attention,
    "mamba2 beside attention": (*each(DECODERS["mamba2"].attention), SelfAttention()),
}
KINDS = {name: decoder(attention=mixers, n_layers=4) for name, mixers in MIXERS.items()}
WITHOUT_WINDOWS = {
    name: decoder(attention=tuple(replace(part, **{"window": 0} if part.window else {}) for part in mixers), n_layers=4)
    for name, mixers in MIXERS.items()
}


def shared(engine: Engine, prompt: list[int], new: int = 3) -> int:
    """Check the answer to a prompt, and return the number of its tokens that were cached."""
    request = engine.add(Request(prompt, GREEDY, new))
    engine.finish()
    assert request.error is None
    assert request.tokens == plainly(engine.model, request)
    return request.num_shared


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("kind", "again", "longer"), [("paged", 8, 8), ("conversation", 11, 11)])
def test_prompt_continues_from_the_end_of_an_earlier_one(name: str, kind: str, again: int, longer: int) -> None:
    # a windowed layer drops the keys outside its window
    model = KINDS[name] if kind == "paged" else WITHOUT_WINDOWS[name]
    engine = Engine(model, cache=CACHES[kind](model), compile_after=None)
    assert shared(engine, TEXT) == 0
    assert shared(engine, TEXT) == again
    assert shared(engine, [*TEXT, 9, 7]) == longer
    assert shared(engine, [*TEXT[:-1], 0]) == again  # the last turn is edited
    assert shared(engine, [*TEXT[:5], 0]) == 0  # all snapshots are after the common prefix


def test_chat_continues_after_the_last_answer_in_another_engine() -> None:
    model, cache = MODELS["recurrent"], CACHES["conversation"](MODELS["recurrent"])
    first = Request(TEXT[:6], GREEDY, 4)
    run(model, [first], cache=cache)
    # the last token was never computed by the model
    assert shared(Engine(model, cache=cache), [*TEXT[:6], *first.tokens, 7, 8]) == 9


def test_samples_of_one_prompt_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = MODELS["recurrent"], tokens_read(monkeypatch)
    prompt = (TEXT * 2)[:20]
    for kind, tokens in ("contiguous", 20 + 3), ("paged", 20 + 3 * 4):
        read.clear()
        samples = [Request(prompt, replace(GREEDY, temperature=1.0), 4, seed=i) for i in range(4)]
        run(model, samples, cache=CACHES[kind](model), compile_after=None)
        assert sum(read) == tokens + 4 * 3
        assert [r.tokens for r in samples] == [plainly(model, r) for r in samples]


def test_long_prompts_have_snapshots_after_every_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["recurrent"]
    monkeypatch.setattr(StatePrefixCache, "stride", property(lambda self: 4, lambda self, value: None), raising=False)
    engine = Engine(model, cache=CACHES["paged"](model))
    shared(engine, (TEXT * 2)[:20])
    assert shared(engine, [*TEXT[:10], 0]) == 8
    assert shared(engine, [*TEXT[:7], 0]) == 4


def test_snapshots_are_as_large_as_the_cache_at_most_and_the_oldest_is_dropped_first() -> None:
    snapshots, state = Snapshots(), {"0.sum": torch.zeros(8)}
    for length in range(1, 8):
        snapshots.add(bytes([length]), length, state, most=170)
        snapshots.by_hash.move_to_end(bytes([1]))
    assert [length for length, _ in snapshots.by_hash.values()] == [4, 5, 6, 7, 1]
    assert sorted(snapshots.lengths) == [1, 4, 5, 6, 7]
    assert snapshots.bytes == 160
    model = MODELS["recurrent"]
    cache = CACHES["paged"](model)
    engine = Engine(model, cache=cache)
    for start in range(30):
        shared(engine, [start, *TEXT], 1)
    held = SNAPSHOTS[cache.cache]
    assert 4 < len(held.by_hash) < 30 * 2
    assert held.bytes <= cache.cache.nbytes()


def test_draft_needs_a_cache_that_can_be_rolled_back() -> None:
    model = MODELS["recurrent"]
    with pytest.raises(UserError, match="can be rolled back by 0 tokens: make one with keep=3"):
        Engine(model, cache=CACHES["contiguous"](model), draft=LookupDraft(3))
