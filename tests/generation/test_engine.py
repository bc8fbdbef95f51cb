"""Continuing prompts: the tokens of the plain run, whoever is beside, and no further than asked."""

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from onward.config.decoder import Alibi, DecoderConfig, Learned, SelfAttention
from onward.errors import UserError
from onward.generation.cache.blocks import BlockManager
from onward.generation.cache.manager import CacheManager
from onward.generation.cache.prefix_files import PrefixFiles
from onward.generation.distribution import next_token_distribution
from onward.generation.drafts.lookup import LookupDraft
from onward.generation.drafts.model_draft import ModelDraft
from onward.generation.drafts.proposal import Draft
from onward.generation.drafts.verify import DRAW
from onward.generation.engine.engine import Engine
from onward.generation.engine.generate import generate
from onward.generation.request import Request
from onward.generation.runner import Runner
from onward.generation.sampling import Sampling
from onward.kernels.draws import draw
from onward.model.cache import KVCache
from onward.model.decoder import Decoder
from onward.model.paged import PagedKVCache

from support.devices import device, on_device
from support.grids import first, thinned
from support.reading import tokens_read

GREEDY, WARM = Sampling(temperature=0), Sampling(temperature=1.3, top_k=20, top_p=0.95)
CONFIGS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"position": Learned()},
    "alibi": {"position": Alibi()},
    "windows": {"attention": (SelfAttention(window=5), SelfAttention())},
}


def decoder(kind: str = "rotary", **changes: object) -> Decoder:
    torch.manual_seed(3)
    sizes = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "context_length": 24}
    model = on_device(Decoder(DecoderConfig(**sizes | CONFIGS[kind] | changes)).eval())  # type: ignore[arg-type]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)  # far from uniform, so that the choices hang on the model
    return model


def run(model: Decoder, requests: list[Request], **options: object) -> list[list[int]]:
    for _ in generate(model, requests, **options):  # type: ignore[arg-type]
        pass
    return [request.tokens for request in requests]


@torch.no_grad()
def plainly(model: Decoder, request: Request) -> list[int]:
    """Without a cache, without company: the whole context through the model for every token."""
    prompt, tokens = request.prompt, list[int]()
    length, context = model.config.context_length, list(prompt)
    for index in range(request.max_new_tokens):
        if len(context) > length:
            context = context[-(length // 2 or 1) :]
        logits, may_end = model(torch.tensor([context]))[:, -1], index >= request.min_new_tokens
        allowed = torch.tensor([may_end or token not in request.stop_token_ids for token in range(logits.size(1))])
        p = next_token_distribution(logits, request.sampling, [prompt + tokens], [len(prompt)], allowed)
        token = int(draw(p, torch.tensor([request.seed]), torch.tensor([index]), DRAW))
        if token in request.stop_token_ids:
            break
        tokens.append(token)
        context.append(token)
    return tokens


PROMPTS = [[1], [4, 7, 1, 9, 30, 2, 2], [11, 12, 13], [5, 6]]


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
    for request, token in generate(model, requests):
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


BAD = {
    "an empty prompt": (Request([], GREEDY, 5), "the prompt is empty"),
    "a prompt and new tokens beyond the context": (Request([1] * 20, GREEDY, 5), "context of 24"),
    "fewer than no tokens": (Request([1], GREEDY, -1), "max_new_tokens is -1"),
    "a token id out of range": (Request([1, 50], GREEDY, 5), "token id 50 is out of range"),
    "a negative token id": (Request([-1], GREEDY, 5), "token id -1 is out of range"),
}


@pytest.mark.parametrize("case", BAD)
def test_impossible_request_is_a_user_error(case: str) -> None:
    request, message = BAD[case]
    with pytest.raises(UserError, match=message):
        run(decoder(), [request])


def test_no_requests_and_no_new_tokens_give_no_tokens() -> None:
    assert run(decoder(), []) == []
    assert run(decoder(), [Request([1], GREEDY, 0)]) == [[]]


MODELS = {kind: decoder(kind) for kind in CONFIGS}
DRAFTER = decoder(n_layers=1)
DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "no draft": lambda: None,
    "look-up": lambda: LookupDraft(num_draft_tokens=3, ngram=2),
    "a model": lambda: ModelDraft(DRAFTER, num_draft_tokens=3),
}


def requests_of(random: Random) -> list[Request]:
    """Up to seven requests, some of which begin alike."""
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
    if kind in ("whole", "growing"):
        return CacheManager(KVCache(model.config, rows, 24, chunk, step=5 if kind == "growing" else 0, device=device()))
    blocks = 24 // 4 + chunk // 4 + 2 if kind == "scarce" else 200  # hardly more than one request needs
    return BlockManager(PagedKVCache(model.config, rows, 24, chunk, blocks=blocks, block_size=4, device=device()))


@pytest.mark.parametrize("mix", first(60, range(200)))
def test_request_has_the_same_tokens_in_every_batch_cache_and_chunking(mix: int) -> None:
    random = Random(mix)
    kind, draft = random.choice(list(CONFIGS)), random.choice(list(DRAFTS))
    model, rows, chunk = MODELS[kind], random.randint(1, 5), random.choice([4, 5, 8, 24])
    alone = [copy(request) for request in requests_of(random)]
    together = [replace(request, tokens=[]) for request in alone]
    for request in alone:
        request.tokens = plainly(model, request)
        if draft != "no draft" and request.sampling.temperature:  # another draw of the same distribution
            request.tokens = []
            engine = Engine(model, rows=1, draft=DRAFTS[draft]())
            engine.add(request)
            list(engine.run())
    engine = Engine(model, rows=rows, cache=cache_of(model, random, rows, chunk), draft=DRAFTS[draft]())
    waiting = list(together)
    while waiting or engine.busy:  # they come at different times
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


def test_samples_of_one_prompt_share_its_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = MODELS["rotary"], tokens_read(monkeypatch)
    first = Request(PROMPTS[1], WARM, 6)
    rest = [Request(PROMPTS[1], WARM, 6, seed=6 + i) for i in range(3)]
    run(model, [first, *rest], compile_after=None)  # compiled steps are not seen
    assert sum(calls) == len(PROMPTS[1]) + 3 + 4 * 5
    assert [r.tokens for r in [first, *rest]] == [plainly(model, r) for r in [first, *rest]]


def test_request_larger_than_the_cache_fails() -> None:
    model = MODELS["rotary"]
    engine = Engine(
        model, rows=2, cache=BlockManager(PagedKVCache(model.config, 2, 24, 8, blocks=2, block_size=4, device=device()))
    )
    engine.add(Request([1] * 5, GREEDY, 10))
    request = engine.scheduler.waiting[0]
    list(engine.run())
    assert request.finish_reason == "error"
    assert "no room for" in str(request.error)


def test_nan_logits_name_the_module_that_made_the_first_nan() -> None:
    model = decoder()
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[3] = math.nan  # type: ignore[union-attr, index, operator]
    with pytest.raises(UserError, match=r"the first NaN is in blocks\.1\.mlp\.up"):
        run(model, [Request([1, 2], GREEDY, 3)])


@pytest.mark.parametrize("temperature", [0, 1])
def test_request_without_an_allowed_token_fails(temperature: float) -> None:
    nothing = Sampling(temperature, suppress_tokens=tuple(range(50)))
    with pytest.raises(UserError, match="no token may come next"):
        run(MODELS["rotary"], [Request([1, 2], nothing, 3)])


@pytest.mark.parametrize("kind", CONFIGS)
def test_prompt_on_disk_is_not_read_again_and_changes_no_token(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = MODELS[kind], tokens_read(monkeypatch)
    longer = [*PROMPTS[1], 3, 8]
    for prompt, new in (PROMPTS[1], 7), (PROMPTS[1], 1), (longer, 2), (longer, 1):
        read.clear()
        request = Request(prompt, WARM, 5)
        assert run(model, [request], files=PrefixFiles(tmp_path, model), compile_after=None) == [
            plainly(model, request)
        ]
        assert read[0] == new


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


def small_cache(model: Decoder, chunk: int = 8) -> CacheManager:
    return CacheManager(KVCache(model.config, 2, 24, chunk, device=device()))


IMPOSSIBLE = {
    "no rows": ({"rows": 0}, "rows is 0"),
    "more rows than the cache": (
        {"rows": 9, "cache": small_cache(MODELS["rotary"])},
        "rows is 9",
    ),
    "another model's cache": ({"cache": small_cache(DRAFTER)}, "belongs to another model"),
    "a short chunk": (
        {"cache": small_cache(MODELS["rotary"], 4), "draft": LookupDraft(4)},
        "needs 5",
    ),
    "a draft with a short context": (
        {"draft": ModelDraft(decoder("learned", context_length=9))},
        "the draft has 9 positions",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_engine_is_a_user_error(case: str) -> None:
    options, message = IMPOSSIBLE[case]
    with pytest.raises(UserError, match=message):
        Engine(MODELS["rotary"], **options)  # type: ignore[arg-type]


def failing(at: int) -> Callable[..., Any]:
    """A processor or stop function that raises from its call number `at` on."""
    calls = count()

    def raise_then(*inputs: Any) -> Any:
        if next(calls) >= at:
            raise RuntimeError("a user's mistake")
        return inputs[-1] if isinstance(inputs[-1], torch.Tensor) else False

    return raise_then


class Raises:
    """A constraint that raises when it is asked for the second token."""

    def __init__(self) -> None:
        self.tokens = 0

    def allowed(self) -> torch.Tensor:
        if self.tokens:
            raise RuntimeError("a user's mistake")
        return torch.ones(50, dtype=torch.bool)

    def accept(self, token: int) -> bool:
        self.tokens += 1
        return True

    def copy(self) -> Any:
        return copy(self)


BAD_TOKEN = 41  # whose embedding is NaN
NOT_BAD = torch.arange(50) != BAD_TOKEN
FAILURES: dict[str, tuple[Callable[[], Request], str]] = {
    "a processor raises": (
        lambda: Request([1, 2], Sampling(processors=(failing(2),)), 9, seed=1),
        "a user's mistake",
    ),
    "a processor returns NaN": (
        lambda: Request([1, 2], Sampling(processors=(lambda text, logits: logits / 0 * 0,)), 9, seed=1),
        "processors[0] (<lambda>) returned NaN or infinity",
    ),
    "a stop function raises": (lambda: Request([1, 2], WARM, 9, stop=failing(2), seed=1), "a user's mistake"),
    "a constraint raises": (lambda: Request([1, 2], WARM, 9, constraint=Raises(), seed=1), "a user's mistake"),
    "no token is allowed": (
        lambda: Request([1, 2], Sampling(suppress_tokens=tuple(range(50))), 9),
        "no token may come next",
    ),
    "a token makes NaN": (lambda: Request([1, BAD_TOKEN, 2], WARM, 9, seed=1), "the first NaN is in embed"),
    "a token of a long prompt makes NaN": (
        lambda: Request([*range(3, 12), BAD_TOKEN, 2], WARM, 9, seed=1),
        "the first NaN is in embed",
    ),
}


@pytest.mark.parametrize("draft", [None, "look-up"])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "windows, paged", "windows"])
@pytest.mark.parametrize("case", FAILURES)
def test_request_that_cannot_go_on_fails_alone(case: str, kind: str, draft: str | None) -> None:
    make, message = FAILURES[case]
    model = decoder("windows" if "windows" in kind else "rotary")
    with torch.no_grad():
        model.embed.weight[BAD_TOKEN] = math.nan
    memory = KVCache(model.config, 3, 24, 8, device=device())
    paged = lambda: BlockManager(PagedKVCache(model.config, 3, 24, 8, blocks=22, block_size=4, device=device()))
    cache = paged() if "paged" in kind else CacheManager(memory)
    look_up = LookupDraft(num_draft_tokens=3, ngram=2) if draft else None
    engine = Engine(model, cache=cache, allowed=NOT_BAD, draft=look_up)
    before, bad = [Request(p, GREEDY, 9) for p in PROMPTS[:2]], make()
    after = [Request(p, GREEDY, 9) for p in PROMPTS]
    for request in (*before, bad, *after):
        engine.add(request)
    list(engine.run())
    assert bad.finish_reason == "error"
    assert message in str(bad.error)
    suppressed = Sampling(temperature=0, suppress_tokens=(BAD_TOKEN,))
    for request in (*before, *after):  # also those that come into its row and its blocks
        assert request.tokens == plainly(model, Request(request.prompt, suppressed, 9))
        assert request.finish_reason == "length"


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
    """A list that counts the numbers that are copied out of it."""

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
    for _ in range(9):  # prefill, and indices that are made once
        engine.step()
    Watched.copied = 0
    new = sum(len(engine.step()) for _ in range(5))
    assert new >= 15
    assert Watched.copied <= 8 * new  # a few last tokens, and never one of the contexts of more than 40


@pytest.mark.parametrize(
    "draft", [lambda: LookupDraft(4, 1), lambda: ModelDraft(decoder(), 3)], ids=["lookup", "model"]
)
def test_speculation_keeps_the_tokens_before_an_error(draft: Callable[[], Draft]) -> None:
    model, prompt = decoder(), [2, 7, 2, 7, 2, 2]
    free = run(model, [Request(prompt, GREEDY, 12)])[0]

    def processor(text: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(text) == len(prompt) + failing:
            raise ValueError(f"at {failing}")
        return logits

    sampling = replace(GREEDY, processors=(processor,))
    for failing in range(12):
        requests = [Request(prompt, sampling, 12), Request(prompt, GREEDY, 12)]
        with pytest.raises(ValueError, match=f"^at {failing}$"):
            run(model, requests, draft=draft())
        assert [r.tokens for r in requests] == [free[:failing], free]
        assert failing < 11 or requests[1].num_accepted


def test_runner_reuses_views_of_a_growing_cache() -> None:
    engine, lengths = Engine(decoder(context_length=300), rows=1, compile_after=None), list[int]()
    cache = engine.runner.cache
    view = cache.view
    cache.view = lambda *key: lengths.append(key[-1]) or view(*key)  # type: ignore[method-assign, func-returns-value, assignment]
    request = engine.add(Request([1], GREEDY, 290))
    for _ in engine.run():
        pass
    assert len(request.tokens) == 290
    assert lengths == [64, 128, 192, 256, 256, 320]  # the cache grows at 256


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
    """Whatever rows are left meanwhile; a later prompt that overtakes others lets them wait for minutes."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=50, d_model=16, n_layers=1, n_heads=2, context_length=32))
    engine = Engine(model, rows=4, prefill_budget=budget)
    requests = [Request([i + 1] * 6, Sampling(temperature=0.0), 1 + i % 4) for i in range(24)]
    for request in requests:
        engine.add(request)
    first = list(dict.fromkeys(request.arrival for request, _ in engine.run()))
    assert first == sorted(first)
