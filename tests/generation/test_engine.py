"""Continuing prompts: the tokens equal those of a plain run, whatever other requests run, and there are no more tokens
than requested."""

from copy import copy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from onward import BlockManager, CacheManager, Decoder, Engine, KVCache, PagedKVCache, Request, Sampling, SelfAttention
from onward.generation import ModelDraft

from support.devices import device
from support.grids import first, thinned
from support.plain_generation import CONFIGS, DRAFTS, GREEDY, MODELS, PROMPTS, WARM, decoder, plainly, run


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_engine_tokens_equal_the_plain_run_without_a_cache(kind: str, sampling: Sampling) -> None:
    model = decoder(kind)
    for prompt in PROMPTS:
        request = Request(prompt, sampling, 15, seed=5)
        assert run(model, [request]) == [plainly(model, request)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_request_has_the_same_tokens_alone_and_in_a_batch(kind: str) -> None:
    model = decoder(kind)
    make = lambda: [
        Request(p, s, n, seed=seed)
        for seed, (p, s, n) in enumerate(zip(PROMPTS, [GREEDY, WARM, WARM, Sampling(0.5, top_k=3)], [15, 3, 0, 12]), -2)
    ]
    alone = [run(model, [request])[0] for request in make()]
    assert [len(tokens) for tokens in alone] == [15, 3, 0, 12]
    assert run(model, make()) == alone
    assert run(model, make()[::-1]) == alone[::-1]


def test_run_yields_each_token_as_it_is_appended() -> None:
    model, requests = decoder(), [Request(p, WARM, 6) for p in PROMPTS[:2]]
    seen: list[list[int]] = [[], []]
    engine = Engine(model)
    for request in requests:
        engine.add(request)
    for request, token in engine.run():
        seen[requests.index(request)].append(token)
        assert request.tokens[-1] == token
    assert seen == [request.tokens for request in requests]
    assert [len(tokens) for tokens in seen] == [6, 6]


def test_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    model = decoder()
    free = run(model, [Request(PROMPTS[0], WARM, 15, seed=5)])[0]
    end = free[5]
    requests = [Request(PROMPTS[0], WARM, 15, seed=5), Request(PROMPTS[1], GREEDY, 15)]
    stopped, _ = run(model, requests, stop_token_ids={end})
    assert stopped == free[: free.index(end)]
    assert all(request.done for request in requests)


def test_tokens_that_are_not_allowed_are_never_sampled() -> None:
    model = decoder()
    allowed = torch.arange(50) < 3
    for sampling in GREEDY, WARM, Sampling(temperature=50.0):
        (tokens,) = run(model, [Request([1], sampling, 20)], allowed=allowed)
        assert set(tokens) <= {0, 1, 2}


@pytest.mark.parametrize(("kind", "length"), thinned(list(CONFIGS), [1, 2, 9, 24]))
def test_sliding_context_continues_from_its_later_half(kind: str, length: int) -> None:
    model = decoder(kind, context_length=length)
    for prompt in [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [1]:
        request = Request(prompt, WARM, 40)
        assert run(model, [request], slide=True)[0] == plainly(model, request)


def test_sliding_in_a_batch_changes_no_token() -> None:
    model = decoder(context_length=9)
    make = lambda: [Request(p * 3, Sampling(), 30 + i, seed=i) for i, p in enumerate(PROMPTS)]
    alone = [run(model, [request], slide=True)[0] for request in make()]
    assert run(model, make(), slide=True) == alone


@pytest.mark.parametrize("kind", CONFIGS)
def test_prompts_longer_than_a_chunk_are_prefilled_in_pieces(kind: str) -> None:
    model = decoder(kind)
    cache = CacheManager(KVCache(model.config, 4, 24, 3, device=device()))
    found = run(model, [Request(p, GREEDY, 10) for p in PROMPTS], cache=cache)
    assert found == [plainly(model, Request(p, GREEDY, 10)) for p in PROMPTS]


def test_requests_without_a_seed_differ() -> None:
    model = decoder()
    first, second = (run(model, [Request([1], Sampling(temperature=2.0), 20)])[0] for _ in range(2))
    assert first != second


def test_no_requests_and_no_new_tokens_give_no_tokens() -> None:
    assert run(decoder(), []) == []
    assert run(decoder(), [Request([1], GREEDY, 0)]) == [[]]


def requests_of(random: Random) -> list[Request]:
    """Up to seven requests, some of which share a prefix."""
    shared = [random.randrange(50) for _ in range(10)]
    result = []
    for seed in range(random.randint(1, 7)):
        prompt = shared[: random.randint(0, 10)] + [random.randrange(50) for _ in range(random.randint(1, 8))]
        sampling = Sampling(
            temperature=random.choice([0, 0, 0.7, 1.5]),
            top_k=random.choice([0, 5]),
            top_p=random.choice([1.0, 0.9]),
            repetition_penalty=random.choice([1.0, 1.3]),
            no_repeat_ngram_size=random.choice([0, 2]),
        )
        minimum, stop = random.choice([0, 2]) if seed else 0, frozenset(random.choice([(), (7, 8)]))
        count = random.randint(2, 24 - len(prompt))
        result.append(Request(prompt, sampling, count, min_new_tokens=minimum, stop_token_ids=stop, seed=seed))
    return result


def cache_of(model: Decoder, random: Random, rows: int, chunk: int) -> CacheManager:
    kind = random.choice(["whole", "growing", "paged", "scarce"])
    options: dict[str, Any] = {"keep": 3, "device": device()}
    if kind in ("whole", "growing"):
        return CacheManager(KVCache(model.config, rows, 24, chunk, step=5 if kind == "growing" else 0, **options))
    blocks = 24 // 4 + chunk // 4 + 2 if kind == "scarce" else 200  # hardly more blocks than one request needs
    return BlockManager(PagedKVCache(model.config, rows, 24, chunk, blocks=blocks, block_size=4, **options))


@pytest.mark.parametrize("mix", first(60, range(200)))
def test_request_has_the_same_tokens_in_every_batch_cache_and_chunking(mix: int) -> None:
    random = Random(mix)
    kind, draft = random.choice(list(CONFIGS)), random.choice(list(DRAFTS))
    model, rows, chunk = MODELS[kind], random.randint(1, 5), random.choice([4, 5, 8, 24])
    alone = [copy(request) for request in requests_of(random)]
    together = [replace(request, tokens=[]) for request in alone]
    for request in alone:
        request.tokens = plainly(model, request)
    engine = Engine(model, rows=rows, cache=cache_of(model, random, rows, chunk), draft=DRAFTS[draft]())
    waiting = list(together)
    while waiting or engine.busy:  # requests arrive at different times
        for _ in range(random.randint(0, 2)):
            if waiting:
                engine.add(waiting.pop(0))
        engine.step()
    assert [request.tokens for request in together] == [request.tokens for request in alone]
    assert all(request.done for request in together)


def test_cancelled_request_frees_its_row_at_once() -> None:
    model = MODELS["rotary"]
    engine = Engine(model, rows=2)
    first, second, third = (engine.add(Request(p, GREEDY, 12)) for p in PROMPTS[:3])
    for _ in range(4):
        engine.step()
    assert [r in engine.scheduler.active for r in (first, second, third)] == [True, True, False]
    engine.cancel(first)
    assert first.finish_reason == "cancelled"
    engine.step()
    assert third in engine.scheduler.active
    list(engine.run())
    assert [second.tokens, third.tokens] == [plainly(model, request) for request in (second, third)]
    assert first.tokens == plainly(model, first)[: len(first.tokens)]


def test_request_that_waits_again_shares_no_tokens_of_its_own() -> None:
    model = MODELS["rotary"]
    engine = Engine(model, cache=BlockManager(PagedKVCache(model.config, 2, 24, 8, blocks=20, block_size=4)))
    request = engine.add(Request([3, 1, 4, 1, 5, 9], GREEDY, 16))
    for _ in range(8):
        engine.step()
    engine.scheduler.remove(request)
    engine.scheduler.waiting.append(request)
    engine.step()
    assert request.num_cached > 12
    assert request.num_shared == 0
    engine.finish()
    assert request.tokens == plainly(model, request)


@pytest.mark.parametrize("vocab_size", [40, 60])
def test_draft_may_have_a_vocabulary_padded_to_another_size(vocab_size: int) -> None:
    model, prompts = MODELS["rotary"], [[1, 45, 3], [7] * 20, [2, 2]]
    for slide in False, True:
        requests = [Request(p, GREEDY, 40 if slide else 24 - len(p)) for p in prompts]
        found = run(model, requests, draft=ModelDraft(decoder(vocab_size=vocab_size)), slide=slide)
        assert found == [plainly(model, r) for r in requests]


@pytest.mark.parametrize("paged", [False, True])
def test_late_sample_does_not_share_what_windows_have_passed(paged: bool) -> None:
    model = MODELS["windows"]
    first = Request(PROMPTS[1], WARM, 6)
    requests = [first, *(Request(PROMPTS[1], WARM, 3 + i, seed=i) for i in range(8))]
    blocks = lambda: BlockManager(PagedKVCache(model.config, 2, 24, 3, blocks=40, block_size=4, device=device()))
    engine = Engine(model, cache=blocks() if paged else CacheManager(KVCache(model.config, 2, 24, 3, device=device())))
    for request in requests:
        engine.add(request)
    list(engine.run())
    assert [r.tokens for r in requests] == [plainly(model, r) for r in requests]


@pytest.mark.parametrize("mix", first(10, range(40)))
def test_samples_over_windows_and_scarce_blocks_keep_their_tokens(mix: int) -> None:
    random = Random(mix)
    model = decoder("windows", attention=(SelfAttention(window=random.randint(5, 9)), SelfAttention()))
    size, rows, chunk = random.randint(2, 4), random.randint(2, 5), random.choice([4, 5, 8])
    prompts = [[random.randrange(50) for _ in range(random.randint(2, 14))] for _ in range(2)]
    requests = [Request(random.choice(prompts), WARM, random.randint(2, 10), seed=i) for i in range(7)]
    blocks = random.randint(-(-24 // size) + chunk // size + 2, 20)
    cache = BlockManager(PagedKVCache(model.config, rows, 24, chunk, blocks=blocks, block_size=size, device=device()))
    engine = Engine(model, cache=cache)
    waiting = list(requests)
    while waiting or engine.busy:
        for _ in range(random.randint(0, 3)):
            if waiting:
                engine.add(waiting.pop(0))
        engine.step()
    assert [r.tokens for r in requests] == [plainly(model, r) for r in requests]
