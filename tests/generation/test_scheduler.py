"""The scheduler, with memory of plain lists and a scripted model: no tensors, no decoder."""

from collections.abc import Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import CacheManager, Request, Sampling
from onward.generation.cache.prefix_cache import PrefixCache
from onward.generation.engine.scheduler import Schedule, Scheduler

from support.decoders import config

LENGTH, CHUNK = 16, 4


class Lists(CacheManager):
    """A cache whose rows are lists, with at most `capacity` tokens in total."""

    def __init__(self, rows: int, capacity: int) -> None:
        memory: Any = SimpleNamespace(rows=rows, chunk=CHUNK, config=config(), rope_length=[LENGTH] * rows)
        self.cache, self.capacity = memory, capacity
        self.held: list[list[int]] = [[] for _ in range(rows)]

    def fits(self, row: int, length: int) -> bool:
        return sum(len(held) for r, held in enumerate(self.held) if r != row) + length <= self.capacity

    def allocate(
        self, row: int, tokens: Sequence[int], rope_length: int, key: str = "", most: int | None = None
    ) -> int | None:
        self.held[row] = []
        return 0 if self.fits(row, len(tokens)) else None

    def reserve(self, row: int, start: int, end: int) -> bool:
        if not self.fits(row, end):
            return False
        assert end - start <= CHUNK
        assert len(self.held[row]) >= start, "a row is written beyond what it holds"
        self.held[row] = self.held[row][:start] + [-1] * (end - start)
        return True

    def free(self, row: int) -> None:
        self.held[row] = []

    def can_continue(self, row: int, position: int) -> bool:
        return position <= len(self.held[row])

    def fork(self, source: int, target: int, length: int) -> None:
        self.held[target] = self.held[source][:length]

    def move(self, source: int, target: int) -> None:
        assert not self.held[target], "a row is assigned twice"
        self.held[target], self.held[source] = self.held[source], []

    def load(self, row: int, length: int, vectors: Mapping[str, Any]) -> None:
        raise AssertionError("nothing is on disk")


def script(context: Sequence[int]) -> int:
    """The next token after a context."""
    return (3 * sum(context) + len(context)) % 11


def expected(request: Request) -> list[int]:
    """The tokens of a request that runs alone."""
    tokens: list[int] = []
    while len(tokens) < request.max_new_tokens:
        tokens.append(script([*request.prompt, *tokens]))
    return tokens


class Script:
    """Runs the steps of a scheduler; every call checks that the tokens in its row are the request's context."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.memory = Lists(rows, capacity)
        self.scheduler = Scheduler(PrefixCache(self.memory), rows, LENGTH)
        self.prefilled = 0  # number of prefilled prompt tokens

    def write(self, row: int, start: int, tokens: Sequence[int]) -> list[int]:
        held = self.memory.held[row]
        held[start : start + len(tokens)] = tokens
        return held[: start + len(tokens)]

    def step(self) -> Schedule:
        schedule = self.scheduler.schedule()
        sampled: list[tuple[Request, int]] = []
        for row, request in enumerate(schedule.decode):
            found = self.write(row, request.num_cached, [request.last_token])
            assert found == request.context
            sampled.append((request, script(found)))
        first, contents = self.scheduler.num_decoding, []
        for place, (request, piece) in enumerate(schedule.prefill):
            contents.append(self.write(first + place, request.num_cached, piece))
            assert contents[-1] == request.context[: len(contents[-1])]
            self.prefilled += len(piece)
        for place in self.scheduler.prefilled(schedule):
            sampled.append((schedule.prefill[place][0], script(contents[place])))
        for request, token in sampled:
            request.tokens.append(token)
            request.num_cached += 1
            if not request.remaining:
                request.finish_reason = "length"
        self.scheduler.release([request for request, _ in sampled])
        return schedule

    def run(self, arriving: Sequence[Request], random: Random) -> None:
        waiting = list(arriving)
        for _ in range(400):
            for _ in range(random.randint(0, 2)):
                if waiting:
                    self.scheduler.add(waiting.pop(0))
            self.step()
        assert not [*waiting, *self.scheduler.waiting, *self.scheduler.active], "a request waits forever"


def request_of(prompt: list[int], new: int) -> Request:
    return Request(prompt, Sampling(), new)


@given(st.integers(0, 10**9).map(Random))
def test_every_request_gets_its_own_tokens_whatever_memory_there_is(random: Random) -> None:
    shared = [random.randrange(9) for _ in range(8)]
    requests = []
    for _ in range(random.randint(1, 9)):
        prompt = shared[: random.randint(0, 8)] + [random.randrange(9) for _ in range(random.randint(1, 3))]
        requests.append(request_of(prompt, random.randint(1, LENGTH - len(prompt))))
    most = max(len(r.prompt) + r.max_new_tokens for r in requests)
    script = Script(random.randint(1, 4), random.randint(most, 3 * most))
    script.run(requests, random)
    assert [r.tokens for r in requests] == [expected(r) for r in requests]
    assert not any(script.memory.held)


def test_request_larger_than_the_memory_fails_alone() -> None:
    script, requests = Script(2, 9), [request_of([1] * 3, 4), request_of([2] * 8, 5), request_of([3] * 12, 2)]
    script.run(requests, Random(0))
    assert requests[0].tokens == expected(requests[0])
    for failed in requests[1:]:
        assert failed.finish_reason == "error"
        assert "no room for" in str(failed.error)


def test_last_to_arrive_is_preempted_first() -> None:
    script, requests = Script(3, 14), [request_of([i, i], 9) for i in range(3)]
    for request in requests:
        script.scheduler.add(request)
    finished: list[Request] = []
    while script.scheduler.active or script.scheduler.waiting:
        script.step()
        finished += [r for r in requests if r.done and r not in finished]
    assert finished == requests
    assert [r.tokens for r in requests] == [expected(r) for r in requests]


@pytest.mark.parametrize("samples", [2, 5])
def test_samples_of_one_prompt_read_it_once(samples: int) -> None:
    script, prompt = Script(samples, 200), list(range(10))
    requests = [request_of(prompt, 3) for _ in range(samples)]
    steps = 0
    for request in requests:
        script.scheduler.add(request)
    while script.scheduler.active or script.scheduler.waiting:
        script.step()
        steps += 1
    assert script.prefilled == len(prompt) + samples - 1
    assert steps == 6  # three chunks (the last gives a token), two more tokens, and the other samples one step later


def test_prompts_of_like_lengths_are_prefilled_together() -> None:
    script = Script(4, 200)
    for prompt in [1], [2], [3, 3], [4]:
        script.scheduler.add(request_of(prompt, 2))
    assert [piece for _, piece in script.step().prefill] == [[1], [2]]
    assert [piece for _, piece in script.step().prefill] == [[3, 3]]


def test_short_prompts_have_four_times_the_budget_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_scheduler.CHUNK", 16)
    scheduler = Scheduler(PrefixCache(Lists(16, 999)), 16, LENGTH, prefill_budget=1)
    decoding = [Request([number], Sampling(), 8) for number in range(8)]
    for request in decoding:
        scheduler.add(request)
    scheduler.prefilled(scheduler.schedule())
    for request in decoding:
        request.tokens.append(1)
        request.num_cached += 1
    for number in range(8):
        scheduler.add(Request([50 + number], Sampling(), 8))
    assert [piece for _, piece in scheduler.schedule().prefill] == [[50], [51], [52], [53]]


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_pieces_grow_with_the_prompts_for_each_request_that_decodes(prompts: int) -> None:
    scheduler = Scheduler(PrefixCache(Lists(4, 99)), 4, LENGTH, prefill_budget=1)
    first, *others = (Request([number + 1] * 4, Sampling(), 8) for number in range(1 + prompts))
    scheduler.add(first)
    scheduler.prefilled(scheduler.schedule())
    first.tokens.append(1)
    first.num_cached += 1
    for request in others:
        scheduler.add(request)
    schedule = scheduler.schedule()
    assert schedule.decode == [first]
    assert [len(piece) for _, piece in schedule.prefill] == [prompts]
    scheduler.pace.add(3.0, decoding=True, prefilling=True)
    assert scheduler.pace.debt == 3.0 / prompts
