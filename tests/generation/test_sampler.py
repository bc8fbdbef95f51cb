"""The sampler waits for the device once per step, and fails requests one by one."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from onward.generation.request import Request
from onward.generation.sampler import NotANumber, Sampler
from onward.generation.sampling import Sampling
from onward.generation.speculation import Proposal

V = 12
WAITS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}


class Waits(TorchFunctionMode):
    """Counts the calls that copy numbers from a tensor to the host."""

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
    "a model's": [Proposal([1, 2], torch.full((2, V), 1 / V)), Proposal(), Proposal([5], torch.full((1, V), 1 / V))],
}


@pytest.mark.parametrize("proposed", PROPOSALS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_waits_for_the_device_once(name: str, proposed: str) -> None:
    proposals = PROPOSALS[proposed]
    requests = [Request([1, 2, 1, i], SAMPLINGS[name], 9, seed=i, tokens=[4, 5]) for i in range(3)]
    logits, sampler = torch.randn(sum(1 + len(p.tokens) for p in proposals), V), Sampler()
    with Waits() as waits:
        sampled, last = sampler.sample(logits, requests, proposals)
    assert waits.calls == {"tolist": 1}
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
