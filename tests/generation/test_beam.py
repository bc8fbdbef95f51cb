"""Beam search: transformers' hypotheses in transformers' order; with enough beams, the best of all sequences."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from onward import Decoder, Sampling, UserError
from onward.checkpoint.huggingface.save import save_model
from onward.generation.search.beam import Hypothesis, beam_search

from support.decoders import DECODERS, LENGTH, config, decoder

CONFIG = config(context_length=24)
MODEL, V = decoder(CONFIG), CONFIG.vocab_size
PROMPTS = [[1], [4, 7, 1, 9, 3, 2, 2], [10, 5, 3], [5, 6]]


def assert_same(found: list[Hypothesis], wanted: list[Hypothesis]) -> None:
    assert [(h.tokens, h.finished) for h in found] == [(h.tokens, h.finished) for h in wanted]
    for name in "score", "logprob":
        values = [[getattr(h, name) for h in each] for each in (found, wanted)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Decoder, Any]]:
    """Models in Onward, each with the same model in transformers."""

    found = []
    for heads in 1, 2, 4:
        model, folder = decoder(replace(CONFIG, n_kv_heads=heads)), tmp_path_factory.mktemp("model")
        save_model(model, folder, {})
        found.append((model, AutoModelForCausalLM.from_pretrained(folder).eval()))
    return found


def theirs(model: Any, prompt: list[int], end: list[int], beams: int, penalty: float, **options: Any) -> Any:
    """The result of transformers for one prompt."""
    out = model.generate(
        torch.tensor([prompt]),
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=penalty,
        do_sample=False,
        eos_token_id=end or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    result = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist()):
        length = next((i for i, token in enumerate(row) if token in end), options["max_new_tokens"])
        finished = length < options["max_new_tokens"]
        result.append(Hypothesis(row[:length], score, score * (length + finished) ** penalty, finished))
    return result


@pytest.mark.parametrize("case", range(40))
def test_hypotheses_and_scores_equal_transformers(pairs: list[tuple[Decoder, Any]], case: int) -> None:
    some = random.Random(case)
    (model, reference), new, beams = some.choice(pairs), some.choice([1, 5, 14, 14]), some.choice([2, 3, 4, 5])
    end, penalty = some.sample(range(V), some.choice([0, 1, 2, 2, 2, 3])), some.choice([-1.0, 0.0, 0.5, 1.0, 1.0, 2.0])
    options: dict[str, Any] = {"max_new_tokens": new, "early_stopping": some.choice([False, True, "never", "never"])}
    changes: dict[str, Any] = {"repetition_penalty": some.choice([1.0, 1.0, 1.4])}
    options["min_new_tokens"] = some.choice([0, 0, 1])
    changes["no_repeat_ngram_size"] = some.choice([0, 0, 0, 2])
    sampling = Sampling(temperature=1.0, **changes)
    settings: dict[str, Any] = {
        "sampling": sampling,
        "stop_token_ids": end,
        "beams": beams,
        "n": beams,
        "length_penalty": penalty,
    }
    for prompt, found in zip(PROMPTS, beam_search(model, PROMPTS, **settings, **options)):
        assert_same(found, theirs(reference, prompt, end, beams, penalty, **options, **changes))


@torch.no_grad()
def logprobs(model: Decoder, tokens: list[int]) -> list[float]:
    """The log-probabilities of the next token, without a cache."""
    return model(torch.tensor([tokens]))[0, -1].log_softmax(-1).tolist()


@pytest.mark.parametrize("penalty", [0.0, 0.7, 2.0, -1.0])
def test_beams_wide_enough_find_every_sequence_in_order(penalty: float) -> None:
    size, length, end, prompts = 4, 3, 2, [[1], [3, 0, 3, 1, 1]]
    model = decoder(config(vocab_size=size))
    found = beam_search(
        model,
        prompts,
        max_new_tokens=length,
        beams=size**length,
        n=size**length,
        length_penalty=penalty,
        early_stopping="never",
        stop_token_ids=[end],
    )
    for prompt, hypotheses in zip(prompts, found):
        every = []
        for new in {text[: (*text, end).index(end) + 1] for text in itertools.product(range(size), repeat=length)}:
            total = sum(logprobs(model, [*prompt, *new[:i]])[token] for i, token in enumerate(new))
            tokens = [token for token in new if token != end]
            every.append(Hypothesis(tokens, total / len(new) ** penalty, total, end in new))
        assert_same(hypotheses, sorted(every, key=lambda h: -h.score))


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("groups", [1, 2])
def test_prompt_has_the_same_hypotheses_alone_and_in_a_batch(kind: str, groups: int) -> None:
    model = decoder(DECODERS[kind])
    options: dict[str, Any] = {
        "max_new_tokens": LENGTH - 7,
        "beams": 4,
        "n": 4,
        "groups": groups,
        "stop_token_ids": [0, 6],
    }
    options["diversity"] = 0.3 * (groups > 1)
    alone = [beam_search(model, [prompt], **options)[0] for prompt in PROMPTS]
    for found, wanted in zip(beam_search(model, PROMPTS, **options), alone):
        assert_same(found, wanted)


def slowly_diverse(
    model: Decoder, prompt: list[int], new: int, beams: int, groups: int, diversity: float, end: int
) -> list[Hypothesis]:
    """Diverse beam search as in the paper, with a list of all candidates and no cache; a group ends when it has enough
    finished beams."""
    size = beams // groups
    running: list[list[tuple[list[int], float, float]]] = [[([], 0.0, 0.0)] for _ in range(groups)]
    finished: list[list[Hypothesis]] = [[] for _ in range(groups)]
    for step in range(1, new + 1):
        said: list[int] = []
        for g in range(groups):
            candidates = []
            for tokens, total, plain in running[g]:
                for token, log_p in enumerate(logprobs(model, prompt + tokens)):
                    less = diversity * said.count(token)
                    candidates.append(([*tokens, token], total + log_p - less, plain + log_p))
            candidates.sort(key=lambda c: -c[1])
            done = [c for c in candidates[:size] if c[0][-1] == end or step == new]
            running[g] = [c for c in candidates if c not in done and c[0][-1] != end][: 0 if step == new else size]
            said += [c[0][-1] for c in done + running[g]]
            finished[g] += [Hypothesis([t for t in c[0] if t != end], c[1] / step, c[2], c[0][-1] == end) for c in done]
            finished[g] = sorted(finished[g], key=lambda h: -h.score)[:size]
            if len(finished[g]) == size:
                running[g] = []
    return sorted(itertools.chain(*finished), key=lambda h: -h.score)


@pytest.mark.parametrize(("beams", "groups", "diversity"), [(4, 2, 0.5), (3, 3, 2.0), (6, 2, 1.0), (4, 2, 0.0)])
def test_diverse_search_equals_the_papers_algorithm(beams: int, groups: int, diversity: float) -> None:
    found = beam_search(
        MODEL,
        PROMPTS,
        max_new_tokens=6,
        beams=beams,
        groups=groups,
        diversity=diversity,
        n=beams,
        early_stopping=True,
        stop_token_ids=[6],
    )
    for prompt, hypotheses in zip(PROMPTS, found):
        wanted = slowly_diverse(MODEL, prompt, 6, beams, groups, diversity, 6)
        if diversity:
            assert_same(hypotheses, wanted)
        else:  # all groups are equal, so the order of equal results is arbitrary
            assert sorted(h.tokens for h in hypotheses) == sorted(h.tokens for h in wanted)


def test_groups_differ_under_a_large_diversity() -> None:
    options: dict[str, Any] = {"max_new_tokens": 5, "beams": 4, "groups": 4, "n": 4}
    for same, different in zip(
        beam_search(MODEL, PROMPTS, **options), beam_search(MODEL, PROMPTS, diversity=50.0, **options)
    ):
        assert len({tuple(h.tokens) for h in same}) == 1
        for place in zip(*(h.tokens for h in different)):
            assert len(set(place)) == 4


def test_one_beam_is_greedy_and_more_are_at_least_as_likely() -> None:
    one, many = (beam_search(MODEL, PROMPTS, max_new_tokens=8, beams=beams) for beams in (1, V**2))
    for prompt, (greedy,), (best,) in zip(PROMPTS, one, many):
        tokens = list(prompt)
        for _ in range(8):
            p = logprobs(MODEL, tokens)
            tokens.append(p.index(max(p)))
        assert prompt + greedy.tokens == tokens
        assert best.score >= greedy.score


def test_banned_tokens_leave_fewer_hypotheses() -> None:
    allowed = torch.arange(V) < 2
    (found,) = beam_search(MODEL, [[3]], max_new_tokens=2, beams=8, n=8, allowed=allowed)
    assert sorted(h.tokens for h in found) == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_no_prompts_or_no_new_tokens_give_empty_hypotheses() -> None:
    assert beam_search(MODEL, [], max_new_tokens=3) == []
    assert beam_search(MODEL, [[1]], max_new_tokens=0) == [[Hypothesis([], 0.0, 0.0, False)]]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "more hypotheses than beams": ({"beams": 2, "n": 3}, "n is 3: it must be from 1 to beams, 2"),
    "no hypothesis": ({"n": 0}, "n is 0"),
    "no beams": ({"beams": 0}, "beams is 0"),
    "more beams than there is room for": ({"beams": 10**23}, "it must be from 1 to 10000"),
    "groups of unequal size": ({"beams": 4, "groups": 3}, "groups is 3: beams, 4, must be a multiple"),
    "no groups": ({"groups": 0}, "groups is 0"),
    "diversity in one group": ({"diversity": 0.5}, "acts between groups"),
    "negative diversity": ({"diversity": -0.5, "groups": 2}, "diversity is -0.5"),
    "a length penalty that is no number": ({"length_penalty": math.nan}, "length_penalty is nan"),
    "an unknown way to stop": ({"early_stopping": "soon"}, "early_stopping is 'soon'"),
    "an empty prompt": ({"prompts": [[1], []]}, "the prompt is empty"),
    "a prompt beyond the context": ({"prompts": [[1] * 22]}, "maximum context length is 24"),
    "a token id out of range": ({"prompts": [[V]]}, f"token id {V}"),
    "no allowed token": ({"allowed": torch.zeros(V, dtype=torch.bool)}, "no token may come next"),
}


@pytest.mark.parametrize("case", BAD)
def test_impossible_beam_search_is_a_user_error(case: str) -> None:
    options, message = BAD[case]
    with pytest.raises(UserError, match=message):
        beam_search(MODEL, **{"prompts": [[1]], "max_new_tokens": 3, **options})


def test_nan_weights_are_named_in_beam_search() -> None:
    model = decoder(CONFIG)
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = math.nan
    with pytest.raises(UserError, match=r"the first NaN is in blocks\.1\.mlp\.out"):
        beam_search(model, [[1]], max_new_tokens=3)
