"""Contrastive search: what its formula says, computed without a cache."""

import math
from typing import Any

import pytest
import torch

from onward.base.errors import UserError
from onward.generation.distribution import next_token_distribution
from onward.generation.sampling import Sampling
from onward.generation.search.contrastive import contrastive_search
from onward.model.decoder import Decoder

from support.decoders import DECODERS, LENGTH, config, decoder
from support.grids import thinned

CONFIG = config(context_length=24)
MODEL, V = decoder(CONFIG), CONFIG.vocab_size
PROMPTS = [[1], [4, 7, 1, 9, 3, 2, 2], [10, 5, 3], [5, 6]]


@torch.no_grad()
def by_formula(
    model: Decoder, prompt: list[int], alpha: float, k: int, new: int, sampling: Sampling | None = None, end: int = -1
) -> list[int]:
    """Each candidate with the whole text before it through the model, and each pair of states compared."""
    text = list(prompt)
    for _ in range(new):
        p = next_token_distribution(
            model(torch.tensor([text]))[:, -1], sampling or Sampling(temperature=1), [text], [len(prompt)]
        )[0]
        values = {}
        for token in sorted(range(V), key=lambda v: -p[v])[:k]:
            h = model.hidden(torch.tensor([[*text, token]]))[0]
            likeness = max(float(h[-1] @ state / (h[-1].norm() * state.norm())) for state in h[:-1])
            values[token] = (1 - alpha) * float(p[token]) - alpha * likeness
        text.append(max(values, key=values.__getitem__))
        if text[-1] == end:
            return text[len(prompt) : -1]
    return text[len(prompt) :]


KINDS = [kind for kind in DECODERS if kind != "scaled turns"]  # whose rotations depend on the final length


@pytest.mark.parametrize(("kind", "options"), thinned(KINDS, [(0.6, 4), (0.2, V), (1.0, 2)]))
def test_tokens_follow_the_formula_alone_and_in_a_batch(kind: str, options: tuple[float, int]) -> None:
    (alpha, k), model, new = options, decoder(DECODERS[kind]), LENGTH - 7
    wanted = [by_formula(model, prompt, alpha, k, new) for prompt in PROMPTS]
    for prompt, tokens in zip(PROMPTS, wanted):
        assert contrastive_search(model, [prompt], max_new_tokens=new, alpha=alpha, k=k) == [tokens]
    assert contrastive_search(model, PROMPTS, max_new_tokens=new, alpha=alpha, k=k) == wanted


def test_prompt_that_ends_changes_no_other() -> None:
    free = contrastive_search(MODEL, PROMPTS, max_new_tokens=14)
    ends = {tokens[i] for i, tokens in enumerate(free)}
    for end in ends:
        found = contrastive_search(MODEL, PROMPTS, max_new_tokens=14, stop_token_ids=[end])
        assert found == [by_formula(MODEL, prompt, 0.6, 4, 14, end=end) for prompt in PROMPTS]
        assert min(map(len, found)) < 14


def test_alpha_0_is_greedy_and_a_high_alpha_avoids_repeats() -> None:
    assert contrastive_search(MODEL, PROMPTS, max_new_tokens=14, alpha=0) == [
        by_formula(MODEL, prompt, 0, 1, 14) for prompt in PROMPTS
    ]
    kinds = [
        sum(len(set(tokens)) for tokens in contrastive_search(MODEL, PROMPTS, max_new_tokens=14, alpha=alpha, k=8))
        for alpha in (0.0, 0.8)
    ]
    assert kinds[1] > kinds[0]


def test_sampling_shapes_the_candidates() -> None:
    sampling = Sampling(temperature=0.7, repetition_penalty=1.5, no_repeat_ngram_size=2, top_p=0.9)
    found = contrastive_search(MODEL, PROMPTS, max_new_tokens=14, alpha=0.3, sampling=sampling)
    assert found == [by_formula(MODEL, prompt, 0.3, 4, 14, sampling) for prompt in PROMPTS]
    few = contrastive_search(MODEL, PROMPTS, max_new_tokens=14, alpha=1.0, k=9, allowed=torch.arange(V) < 3)
    assert {token for tokens in few for token in tokens} <= {0, 1, 2}


def test_no_prompts_or_no_new_tokens_give_no_tokens() -> None:
    assert contrastive_search(MODEL, [], max_new_tokens=3) == []
    assert contrastive_search(MODEL, [[1]], max_new_tokens=0) == [[]]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "alpha above 1": ({"alpha": 1.5}, "alpha is 1.5"),
    "alpha that is no number": ({"alpha": math.nan}, "alpha is nan"),
    "no candidates": ({"k": 0}, "k is 0"),
    "an empty prompt": ({"prompts": [[1], []]}, "the prompt is empty"),
    "a prompt beyond the context": ({"prompts": [[1] * 22]}, "maximum context length is 24"),
    "no token that may come": ({"allowed": torch.zeros(V, dtype=torch.bool)}, "no token may come next"),
}


@pytest.mark.parametrize("case", BAD)
def test_impossible_contrastive_search_is_a_user_error(case: str) -> None:
    options, message = BAD[case]
    with pytest.raises(UserError, match=message):
        contrastive_search(MODEL, **{"prompts": [[1]], "max_new_tokens": 3, **options})
