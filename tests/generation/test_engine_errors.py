"""Requests and engines that cannot work are refused in one sentence, and a failing request does not affect others."""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from onward import BlockManager, CacheManager, Decoder, Engine, KVCache, PagedKVCache, Request, Sampling, UserError
from onward.generation import Draft, LookupDraft, ModelDraft

from support.devices import device
from support.plain_generation import DRAFTER, GREEDY, MODELS, PROMPTS, WARM, decoder, plainly, run

BAD = {
    "an empty prompt": (Request([], GREEDY, 5), "the prompt is empty"),
    "a prompt and new tokens beyond the context": (Request([1] * 20, GREEDY, 5), "maximum context length is 24"),
    "a negative number of tokens": (Request([1], GREEDY, -1), "max_new_tokens is -1"),
    "a token id out of range": (Request([1, 50], GREEDY, 5), "token id 50 is out of range"),
    "a negative token id": (Request([-1], GREEDY, 5), "token id -1 is out of range"),
}


@pytest.mark.parametrize("case", BAD)
def test_impossible_request_is_a_user_error(case: str) -> None:
    request, message = BAD[case]
    with pytest.raises(UserError, match=message):
        run(decoder(), [request])


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
        "Cannot verify 4 draft tokens",
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
    """A processor or stop function that raises an error from call number `at` on."""
    calls = count()

    def raise_then(*inputs: Any) -> Any:
        if next(calls) >= at:
            raise RuntimeError("a user's mistake")
        return inputs[-1] if isinstance(inputs[-1], torch.Tensor) else False

    return raise_then


class Raises:
    """A constraint that raises an error at the second token."""

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


BAD_TOKEN = 41  # the token whose embedding is NaN
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
    for request in (*before, *after):  # including requests that later use the failed request's row and blocks
        assert request.tokens == plainly(model, Request(request.prompt, suppressed, 9))
        assert request.finish_reason == "length"


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
