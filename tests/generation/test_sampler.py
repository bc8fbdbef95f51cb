"""The sampler waits for the device once per step and at most once per accepted draft token; an error fails only its own
request."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from onward import Request, Sampling
from onward.generation import Proposal
from onward.generation.engine.sampler import Sampler
from onward.generation.failures import NotANumber

V = 12
WAITS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}


class Waits(TorchFunctionMode):
    """Counts the calls that copy values from a tensor to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.calls.update([name] if name in WAITS else [])
        return func(*args, **(kwargs or {}))


SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "truncated": Sampling(top_k=5, top_p=0.9, min_p=0.01, typical_p=0.9),
    "penalties": Sampling(repetition_penalty=1.2, frequency_penalty=0.1, no_repeat_ngram_size=2, logit_bias={3: 1.0}),
    "bans": Sampling(suppress_tokens=(1, 2), forced_tokens=(4,)),
}
PROPOSALS = {
    "nothing proposed": [Proposal()] * 3,
    "a look-up": [Proposal([1, 2]), Proposal(), Proposal([5])],
}


@pytest.mark.parametrize("proposed", PROPOSALS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_waits_for_the_device_once_and_for_each_accepted_token(name: str, proposed: str) -> None:
    proposals = PROPOSALS[proposed]
    requests = [Request([1, 2, 1, i], SAMPLINGS[name], 9, seed=i, tokens=[4, 5]) for i in range(3)]
    logits, sampler = torch.randn(sum(1 + len(p.tokens) for p in proposals), V), Sampler()
    with Waits() as waits:
        sampled, last = sampler.sample(logits, requests, proposals)
    assert 1 <= waits.calls["tolist"] <= max(len(new) for new in sampled if isinstance(new, list))
    assert waits.calls.keys() == {"tolist"}
    assert [tokens[-1] for tokens in sampled if isinstance(tokens, list)] == last.tolist()


def test_rows_without_a_distribution_fail_by_themselves() -> None:
    requests = [Request([1], Sampling(temperature=0), 9) for _ in range(3)]
    requests.append(Request([1], Sampling(suppress_tokens=tuple(range(V))), 9))
    logits = torch.randn(4, V)
    logits[1, 3] = torch.nan
    sampled, _ = Sampler().sample(logits, requests, [Proposal()] * 4)
    assert sampled[0] == [int(logits[0].argmax())]
    assert sampled[2] == [int(logits[2].argmax())]
    assert isinstance(sampled[1], NotANumber)
    assert "no token may come next" in str(sampled[3])


def test_nan_after_a_proposal_fails_only_when_its_turn_comes() -> None:
    request, logits = Request([1], Sampling(temperature=0), 9), torch.eye(V)[[3, 4]]
    logits[1] = torch.nan
    assert Sampler().sample(logits, [request], [Proposal([5])])[0] == [[3]]
    assert Sampler().sample(logits, [request], [Proposal([3])])[0] == [[3]]
    [failed] = Sampler().sample(logits[1:], [request], [Proposal()])[0]
    assert isinstance(failed, NotANumber)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_tokens_drawn_by_the_kernel_are_those_drawn_from_the_distribution(masked: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    for size in 5, 16, 1003:
        logits = (3 * torch.randn(40, size)).to(dtype)
        allowed = torch.rand(size) < 0.5 if masked else None
        requests = [
            Request([1], Sampling(temperature=(0, 0.7, 1, 2.5)[i % 4]), seed=i * 7**20, max_new_tokens=9)
            for i in range(40)
        ]
        for request in requests[20:]:
            request.tokens += [1] * 5
        proposals = [Proposal() for _ in requests]
        drawn = Sampler(allowed).sample_plain(logits, requests, proposals)
        for request in requests:
            request.sampling = replace(request.sampling, top_k=size)  # keeps all tokens, but is not plain sampling
        slow, last = Sampler(allowed).sample(logits, requests, proposals)
        assert drawn[0] == slow
        assert torch.equal(drawn[1], last)


@pytest.mark.parametrize("drafted", [[], [3, 2]])
def test_a_kernel_draws_no_stop_token_before_the_minimum_of_tokens(drafted: list[int]) -> None:
    torch.manual_seed(0)
    early = 0
    for seed in range(40):
        request = Request([1], Sampling(temperature=(0, 1)[seed % 2]), 9, seed=seed, stop_token_ids=frozenset({2, 4}))
        request.min_new_tokens = 2  # the answer may end from the third token on
        logits, sampler = 3 * torch.randn(1 + len(drafted), 6), Sampler()
        found, _ = sampler.sample(logits, [request], [Proposal(drafted)])
        early += not drafted and sampler.sample_plain(logits, [request], [Proposal()]) is None
        request.sampling = replace(request.sampling, top_k=6)  # keeps all tokens, but is not plain sampling
        assert found == Sampler().sample(logits, [request], [Proposal(drafted)])[0]
        assert not {2, 4} & {*found[0][:2]}
    assert drafted or 5 < early < 25  # the kernel has drawn most tokens


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_kernel_leaves_logits_that_are_not_finite_to_the_distribution(bad: float):
    logits = torch.randn(2, 40)
    logits[1, 17] = bad
    requests = [Request([1], Sampling(temperature=1.0), max_new_tokens=9) for _ in range(2)]
    assert Sampler().sample_plain(logits, requests, [Proposal(), Proposal()]) is None
