"""Speculative decoding gives exactly the model's distribution; steps with and without proposals are timed."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from onward import Decoder, Engine, Request, Sampling, next_token_distribution
from onward.compiled.steps import POOLS
from onward.generation import LookupDraft, ModelDraft, Proposal, expected_tokens
from onward.generation.drafts.lookup import LookupIndex
from onward.generation.drafts.times import LEAST, SpeculationTimes
from onward.generation.drafts.verify import DRAW
from onward.generation.engine import shaped_sampler
from onward.generation.engine.sampler import Sampler
from onward.kernels.draws import draw

from support.decoders import DECODERS

V, LONG, AHEAD, N = 4, 3, 2, 4_000
RANDOM = torch.Generator().manual_seed(0)
# logits after each token, and at the start
TARGET, DRAFTER = (torch.randn(V + 1, V, generator=RANDOM) * 1.5 for _ in range(2))
HOT = Sampling(temperature=1.0)
SAMPLINGS = {
    "plain": HOT,
    "top-k and penalties": Sampling(temperature=1.3, top_k=3, frequency_penalty=0.7, repetition_penalty=1.2),
    "nucleus": Sampling(temperature=0.9, top_p=0.85, logit_bias={1: 0.5}),
}
CRITICAL = 103.4  # chi-square with 63 degrees of freedom exceeds this value with probability 0.001


def after(table: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
    return table[[text[-1] if len(text) > 1 else V for text in texts]]


def distribution(table: Tensor, texts: Sequence[Sequence[int]], s: Sampling) -> Tensor:
    return next_token_distribution(after(table, texts), s, texts, [1] * len(texts))


def proposals(requests: Sequence[Request], kind: str) -> list[Proposal]:
    """Proposals of 0, 1 or 2 tokens: drawn from the drafter with the model's random numbers, or arbitrary."""
    texts = [r.prompt + r.tokens for r in requests]
    rooms = [min(AHEAD, LONG - 1 - len(r.tokens), r.seed % 3) if kind != "none" else 0 for r in requests]
    if kind != "drawn":
        return [Proposal([(r.seed + j) % V for j in range(room)]) for r, room in zip(requests, rooms)]
    found: list[list[int]] = [[] for _ in requests]
    for j in range(AHEAD):
        q = distribution(DRAFTER, [t + new for t, new in zip(texts, found)], requests[0].sampling)
        index = torch.tensor([len(r.tokens) + j for r in requests])
        for new, token in zip(found, draw(q, torch.tensor([r.seed for r in requests]), index, DRAW).tolist()):
            new.append(token)
    return [Proposal(new[:k]) for new, k in zip(found, rooms)]


def sample(s: Sampling, kind: str) -> list[tuple[int, ...]]:
    """The first LONG tokens of N requests."""
    requests = [Request([0], s, LONG, seed=seed) for seed in range(N)]
    accepted, open_ = 0, requests
    while open_:
        drafts = proposals(open_, kind)
        texts = [r.prompt + r.tokens + d.tokens[:j] for r, d in zip(open_, drafts) for j in range(1 + len(d.tokens))]
        for request, new in zip(open_, Sampler().sample(after(TARGET, texts), open_, drafts)[0]):
            assert isinstance(new, list)
            request.tokens += new
            accepted += len(new) - 1
        open_ = [r for r in open_ if len(r.tokens) < LONG]
    assert (accepted > N / 10) == (kind != "none")
    return [tuple(r.tokens[:LONG]) for r in requests]


def assert_follows_the_model(name: str, kind: str) -> None:
    """The tokens have the frequencies that an enumeration of all sequences gives, and equal those of plain decoding."""
    s = SAMPLINGS[name]
    found = sample(s, kind)
    equal = found == sample(s, "none")
    assert equal  # compared beforehand, since a diff of thousands of tuples would be unreadable
    counts, chi = Counter(found), 0.0
    for sequence in itertools.product(range(V), repeat=LONG):
        p, text = 1.0, [0]
        for token in sequence:
            p *= float(distribution(TARGET, [text], s)[0, token])
            text.append(token)
        assert p > 0 or not counts[sequence]
        chi += (counts[sequence] - N * p) ** 2 / (N * p) if p else 0
    assert chi < CRITICAL, chi


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("plain", "certain"),
        ("nucleus", "drawn"),
        pytest.param("plain", "drawn", marks=pytest.mark.long),
        pytest.param("nucleus", "certain", marks=pytest.mark.long),
        *(pytest.param("top-k and penalties", kind, marks=pytest.mark.long) for kind in ("drawn", "certain")),
    ],
)
def test_speculation_has_the_distribution_of_the_model(name: str, kind: str) -> None:
    assert_follows_the_model(name, kind)


right = shaped_sampler.verified
MUTANTS: dict[str, Callable[..., list[list[int]]]] = {
    "every draft token is accepted": lambda drawn, proposals: [
        [*p.tokens, *new[len(p.tokens) :], 0] for new, p in zip(right(drawn, proposals), proposals)
    ],
    "a token is drawn twice": lambda drawn, proposals: [[*new[:1], *new] for new in right(drawn, proposals)],
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_proof_notices_mutant(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaped_sampler, "verified", MUTANTS[mutant])
    with pytest.raises(AssertionError):
        assert_follows_the_model("plain", "drawn")


def test_accepted_proposal_gives_one_token_more() -> None:
    request, sure = Request([0], Sampling(temperature=0), 9), torch.eye(V)[[1, 2, 3]]
    sample = lambda logits, tokens: Sampler().sample(logits, [request], [Proposal(tokens)])[0]
    assert sample(sure, [1, 2]) == [[1, 2, 3]]
    assert sample(sure, [1, 3]) == [[1, 2]]
    assert sample(sure[:1], []) == [[1]]


def test_look_up_proposes_what_followed_the_longest_ngram() -> None:
    cases = {(1, 2, 3, 9, 2, 4, 1, 2): [3, 9, 2], (5, 7, 1, 7): [1, 7, 1], (1, 2, 3): [], (4,): []}
    for text, found in cases.items():
        index = LookupIndex(ngram=2)
        index.extend(text)
        assert index.find(3) == found
        request = Request(list(text[:1]), HOT, 9, tokens=list(text[1:]))
        draft = LookupDraft(num_draft_tokens=3, ngram=2)
        assert [p.tokens for p in draft.propose([request], [2])] == [found[:2]]


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 1.0), (0.5, 1.875), (0.8, 2.952), (1.0, 4.0)])
def test_expected_tokens_per_step_follow_the_formula(rate: float, expected: float) -> None:
    assert expected_tokens(rate, 3) == pytest.approx(expected)


def test_speed_up_is_measured_against_steps_without_proposals() -> None:
    times = SpeculationTimes()
    assert times.speed_up() is None
    times.add(4.0, 3.0, 2.0, True)  # verifying takes 1 s, so that at most 2 tokens in 4 s replace 2 steps of 1 s
    assert times.speed_up() == pytest.approx(0.5)
    for _ in range(LEAST):
        times.add(3.0, 0.0, 1.0, False)  # steps without proposals take 3 s
    assert times.speed_up() == pytest.approx(2 * 3 / 4)


def test_engine_times_its_steps_with_and_without_proposals() -> None:
    model = Decoder(DECODERS["llama"]).eval()
    engine = Engine(model, rows=1, draft=LookupDraft(2))
    request = engine.add(Request([1, 2, 3, 1, 2], Sampling(temperature=0), 7))
    list(engine.run())
    found = engine.times
    assert found.steps + found.plain_steps + 1 == request.steps  # the prefill gives the first token
    assert found.steps > 0
    assert 0 < found.drafting < found.seconds
    assert found.tokens_per_row >= found.steps


@pytest.mark.parametrize("rows", [1, 2])
def test_drafts_and_verification_by_compiled_steps_give_the_same_tokens(rows: int) -> None:
    torch.manual_seed(0)
    model = Decoder(replace(DECODERS["llama"], context_length=300)).eval()
    found: list[list[list[int]]] = []
    for compile_after, draft in (None, None), (0, ModelDraft(model, 3)):
        engine = Engine(model, rows=rows, draft=draft, compile_after=compile_after)
        requests = [Request([1, 2, 3 + i], Sampling(temperature=0.0), max_new_tokens=90, seed=i) for i in range(rows)]
        for request in requests:
            engine.add(request)
        for _ in engine.run():
            pass
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]
    shapes = {shape for ((shape, *_), *_), free in POOLS[model].free.items() if free}
    assert {(rows, 1), (rows, 4)} <= shapes
