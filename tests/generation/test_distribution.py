"""Sampling: from logits to a token."""

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onward import Sampling, UserError, next_token_distribution
from onward.kernels.draws import counter_hash, draw

from support.devices import device

WORDS = {"mat": 0.35, "floor": 0.25, "bed": 0.15, "roof": 0.10, "chair": 0.05, "table": 0.04, "ground": 0.03, "o": 0.03}
LOGITS = torch.tensor([list(WORDS.values())]).log()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1), list(WORDS.values())),
        (Sampling(temperature=1, top_k=3), [0.467, 0.333, 0.200]),
        (Sampling(temperature=1, top_p=0.9), [p / 0.9 for p in (0.35, 0.25, 0.15, 0.10, 0.05)]),
        (Sampling(temperature=2), [math.sqrt(p) / sum(map(math.sqrt, WORDS.values())) for p in WORDS.values()]),
        (Sampling(temperature=0), [1.0]),
        (Sampling(temperature=1, top_k=1), [1.0]),
        (Sampling(temperature=1, top_p=1e-6), [1.0]),
        (Sampling(temperature=1, top_k=99), list(WORDS.values())),
    ],
    ids=str,
)
def test_distribution_of_the_worked_example(sampling: Sampling, expected: list[float]) -> None:
    found = next_token_distribution(LOGITS, [sampling])[0].tolist()
    assert found == pytest.approx(expected + [0.0] * (8 - len(expected)), abs=5e-4)


def test_temperature_two_gives_mat_23_percent() -> None:
    assert float(next_token_distribution(LOGITS, [Sampling(temperature=2)])[0, 0]) == pytest.approx(0.231, abs=5e-4)


def plain(logits: list[float], s: Sampling, banned: set[int]) -> list[float]:
    """The distribution computed from the formulas with Python floats."""
    z = [-math.inf if i in banned else x for i, x in enumerate(logits)]
    order = sorted(range(len(z)), key=lambda i: -z[i])
    if s.temperature == 0:
        return [float(i == order[0]) for i in range(len(z))]
    kept = order[: s.top_k or len(z)]
    weight = {i: math.exp((z[i] - z[order[0]]) / s.temperature) for i in kept}
    total, before, nucleus = sum(weight.values()), 0.0, {}
    for i in kept:
        if before < s.top_p or s.top_p == 1:
            nucleus[i] = weight[i]
        before += weight[i] / total
    return [nucleus.get(i, 0.0) / sum(nucleus.values()) for i in range(len(z))]


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.just(0.0) | st.floats(0.1, 5),
    top_k=st.integers(0, 12),
    top_p=st.just(1.0) | st.floats(0.05, 0.99),
)
# differences far above rounding errors, so that rounding changes neither order nor kept tokens
ROWS = st.lists(st.integers(-3000, 3000), min_size=9, max_size=9, unique=True).map(lambda r: [x / 317 for x in r])


def on_a_border(row: list[float], s: Sampling, banned: set[int]) -> bool:
    """Whether a cumulative probability equals top_p up to rounding, so that keeping or dropping the token are both
    correct."""
    whole = plain(row, Sampling(s.temperature or 1, s.top_k), banned)
    sums, total = [], 0.0
    for p in sorted(whole, reverse=True):
        sums.append(total := total + p)
    return s.top_p < 1 and any(abs(x - s.top_p) < 1e-5 for x in sums)


@given(rows=st.lists(st.tuples(ROWS, SAMPLINGS), min_size=1, max_size=4), banned=st.sets(st.integers(0, 8), max_size=4))
def test_distribution_equals_the_plain_formula_row_by_row(
    rows: list[tuple[list[float], Sampling]], banned: set[int]
) -> None:
    rows = [(row, s) for row, s in rows if not on_a_border(row, s, banned)]
    if not rows:
        return
    mask = torch.tensor([i in banned for i in range(9)])
    found = next_token_distribution(torch.tensor([row for row, _ in rows]), [s for _, s in rows], allowed=~mask)
    for one, (row, s) in zip(found.tolist(), rows):
        assert one == pytest.approx(plain(row, s, banned), abs=2e-6)
        assert sum(one) == pytest.approx(1, abs=1e-5)


PENALIZED = st.builds(
    Sampling,
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 12),
    top_p=st.just(1.0) | st.floats(0.05, 0.99),
    min_p=st.just(0.0) | st.floats(0.01, 0.9),
    typical_p=st.just(1.0) | st.floats(0.05, 0.99),
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2),
    no_repeat_ngram_size=st.integers(0, 3),
    logit_bias=st.dictionaries(st.integers(0, 8), st.floats(-5, 5), max_size=3),
    suppress_tokens=st.lists(st.integers(4, 8), max_size=2).map(tuple),
    forced_tokens=st.just(()) | st.just((3,)),
)


def in_transformers(
    logits: torch.Tensor, s: Sampling, text: list[int], prompt: int, banned: set[int]
) -> torch.Tensor | None:
    """The distribution by transformers' processors in Onward's order; None if the kept tokens depend on rounding."""
    import transformers as t

    ids = torch.tensor([text])
    steps: list[object] = []
    if s.logit_bias:
        steps.append(t.SequenceBiasLogitsProcessor({(k,): v for k, v in s.logit_bias.items()}))
    if s.repetition_penalty != 1:
        steps.append(t.RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.no_repeat_ngram_size:
        steps.append(t.NoRepeatNGramLogitsProcessor(s.no_repeat_ngram_size))
    if s.suppress_tokens:
        steps.append(t.SuppressTokensLogitsProcessor(list(s.suppress_tokens)))
    if banned:
        steps.append(t.MinNewTokensLengthLogitsProcessor(prompt, len(text) + 1, sorted(banned), device=device()))
    if s.forced_tokens and len(text) == prompt:
        steps.append(t.ForcedBOSTokenLogitsProcessor(s.forced_tokens[0]))
        ids = ids[:, :1]  # this processor forces the second token of a text
    scores = logits
    for step in steps:
        is_forced = isinstance(step, t.ForcedBOSTokenLogitsProcessor)
        scores = step(ids if is_forced else torch.tensor([text]), scores)  # type: ignore[operator]
    scores = t.TemperatureLogitsWarper(s.temperature)(ids, scores)
    cuts = [
        (s.top_k, lambda: t.TopKLogitsWarper(s.top_k)),
        (s.top_p < 1, lambda: t.TopPLogitsWarper(s.top_p)),
        (s.min_p, lambda: t.MinPLogitsWarper(s.min_p)),
        (s.typical_p < 1, lambda: t.TypicalLogitsWarper(s.typical_p)),
    ]
    for asked, make in cuts:
        shares = scores.softmax(-1)
        if near(shares, s):
            return None
        scores = make()(ids, scores) if asked else scores  # type: ignore[no-untyped-call]
    return scores.softmax(-1)


def near(shares: torch.Tensor, s: Sampling) -> bool:
    """Whether the set of kept tokens depends on rounding."""
    ranked = shares[0].sort(descending=True).values
    surprise = -shares[0].log()
    distance = (surprise - (shares[0] * surprise).nansum()).abs()
    order = distance.argsort()
    finite = distance[order][shares[0][order] > 0]
    borders = [
        (ranked.cumsum(0) - s.top_p).abs().min(),
        (ranked / ranked[0] - s.min_p).abs().min(),
        (shares[0][order].cumsum(0) - s.typical_p).abs().min() if s.typical_p < 1 else torch.tensor(1.0),
        finite.diff().min() if len(finite) > 1 and s.typical_p < 1 else torch.tensor(1.0),
    ]
    return bool(min(borders) < 1e-4)


@given(
    row=ROWS,
    s=PENALIZED,
    prompt=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    new=st.lists(st.integers(0, 8), max_size=4),
    banned=st.sets(st.integers(0, 8), max_size=2),
)
@settings(max_examples=400)
def test_distribution_equals_transformers(
    row: list[float], s: Sampling, prompt: list[int], new: list[int], banned: set[int]
) -> None:
    logits, text = torch.tensor([row]), prompt + new
    z = in_transformers(logits, s, text, len(prompt), banned)
    allowed = torch.tensor([token not in banned for token in range(9)])
    found = next_token_distribution(logits, s, [text], [len(prompt)], allowed)
    if z is not None and z.isfinite().all():
        torch.testing.assert_close(found, z, rtol=0, atol=1e-6)


def test_distribution_of_the_second_worked_example() -> None:
    logits = torch.tensor([[1.2, 3.1, 0.5, 8.2, -1, 5.5, 6.1, 0.1, 2.5, 4.3]])
    ranked = next_token_distribution(logits, Sampling(temperature=1)).sort(descending=True).values[0]
    assert ranked[:2].tolist() == pytest.approx([0.819, 0.100], abs=5e-4)
    assert int((next_token_distribution(logits, Sampling(temperature=1, top_p=0.9)) > 0).sum()) == 2


@given(row=ROWS, new=st.lists(st.integers(0, 8), max_size=6), a=st.floats(-2, 2), b=st.floats(-2, 2))
def test_frequency_and_presence_penalties_count_generated_tokens_only(
    row: list[float], new: list[int], a: float, b: float
) -> None:
    s = Sampling(temperature=1, frequency_penalty=a, presence_penalty=b)
    found = next_token_distribution(torch.tensor([row]), s, [[0, 1, 1, *new]], [3])
    z = [x - new.count(i) * a - (i in new) * b for i, x in enumerate(row)]
    torch.testing.assert_close(found, torch.tensor([z]).softmax(-1), rtol=0, atol=1e-6)


def test_forced_tokens_come_first_and_in_order() -> None:
    s = Sampling(temperature=1, forced_tokens=(4, 2))
    for n, text in enumerate(([7], [7, 4], [7, 4, 2])):
        found = next_token_distribution(LOGITS, s, [text], [1])[0]
        assert found.argmax() == (4, 2, 0)[n]
        assert (float(found.max()) == 1) == (n < 2)


def test_processors_act_in_order_and_get_the_tokens() -> None:
    seen = []

    def shut(text: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(text))
        return logits.index_fill(0, torch.tensor([text[-1]]), -math.inf)

    s = Sampling(temperature=1, processors=(shut, lambda text, logits: logits * 2))
    found = next_token_distribution(LOGITS, s, [[3, 0]])[0]
    assert seen == [[3, 0]]
    assert found[0] == 0
    torch.testing.assert_close(found[1:], (2 * LOGITS[0, 1:]).softmax(-1))


RESULTS: dict[str, tuple[Any, str]] = {
    "no tensor": (5, "returned 5: it must return logits (V,)"),
    "another shape": (torch.zeros(1, 8), "returned torch.Size([1, 8]): it must return logits (V,)"),
    "NaN": (torch.full((8,), math.nan), "returned NaN or infinity"),
    "infinity": (torch.tensor([math.inf, *[0.0] * 7]), "returned NaN or infinity"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_processor_with_a_bad_result_is_named(case: str) -> None:
    result, said = RESULTS[case]

    def mine(text: Sequence[int], logits: torch.Tensor) -> Any:
        return result

    with pytest.raises(UserError, match=re.escape(said)) as caught:
        next_token_distribution(LOGITS, Sampling(processors=(lambda text, logits: logits, mine)))
    assert str(caught.value).startswith("processors[1] (mine) returned")


def test_processor_is_not_blamed_for_the_logits_of_the_model() -> None:
    found = next_token_distribution(LOGITS * math.nan, Sampling(processors=(lambda text, logits: logits * 2,)))
    assert found.isnan().all()


def test_result_of_a_processor_has_the_dtype_of_the_logits() -> None:
    found = next_token_distribution(LOGITS, Sampling(processors=(lambda text, logits: logits.double(),)))
    assert found.dtype == torch.float32


def test_tokens_not_allowed_have_no_probability() -> None:
    allowed = torch.tensor([False, True, True, False, False, False, True, False])
    for s in Sampling(), Sampling(temperature=0), Sampling(logit_bias={0: 100.0}), Sampling(top_k=2, min_p=0.1):
        assert not (next_token_distribution(LOGITS, s, allowed=allowed)[0] > 0)[~allowed].any()


@given(row=ROWS, temperature=st.floats(0, 1e30) | st.sampled_from([1e-300, 1e-44, 1e-38, 1e-20]))
def test_every_temperature_gives_a_distribution(row: list[float], temperature: float) -> None:
    for scale in 1.0, 1e4:
        found = next_token_distribution(torch.tensor([row]) * scale, [Sampling(temperature)])
        assert float(found.sum()) == pytest.approx(1, abs=1e-5)
        assert int(found.argmax()) == row.index(max(row)) or temperature > 1e4


def test_top_k_keeps_ties_with_the_last_token() -> None:
    found = next_token_distribution(torch.tensor([[2.0, 1.0, 1.0, 0.0]]), [Sampling(1.0, top_k=2)])
    assert (found > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_may_have_any_dtype(dtype: torch.dtype) -> None:
    found = next_token_distribution(torch.tensor([[1.0, 2.0]], dtype=dtype), [Sampling(1.0, top_p=0.99)])
    assert found.dtype == torch.float32
    assert found.tolist()[0] == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)], abs=1e-6)


def splitmix(x: int) -> int:
    """One output of the SplitMix64 generator for the state x."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 2**40), purpose=st.integers(0, 9))
def test_draw_is_a_function_of_seed_index_and_purpose(seed: int, index: int, purpose: int) -> None:
    step = 0x9E3779B97F4A7C15
    x = 0
    for part in seed + step, index * step, purpose * step:
        x = splitmix((x + part) % 2**64)
    assert int(counter_hash(torch.tensor([seed]), torch.tensor([index]), purpose)) % 2**64 == x


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected).square() / expected).sum())


def test_draws_follow_the_distribution() -> None:
    """Draws follow the distribution over many seeds, over the token indices of one seed, and over both together; with 7
    degrees of freedom, chi-square exceeds 24.3 with probability 0.001."""
    n, p = 100_000, next_token_distribution(LOGITS, [Sampling(temperature=1)])
    many, fixed = torch.arange(n), torch.full((n,), 7)
    for seeds, index in (many, fixed), (fixed, many), (many, many):
        chosen = draw(p.expand(n, -1), seeds, index, 0)
        assert chi_square(chosen.bincount(minlength=8).double(), p[0].double() * n) < 24.3
    numbers = [counter_hash(fixed, many + i, purpose).double() for i, purpose in ((0, 0), (1, 0), (0, 1))]
    assert torch.corrcoef(torch.stack(numbers))[0, 1:].abs().max() < 0.015


@given(row=ROWS, s=SAMPLINGS, seed=st.integers(0, 2**63 - 1), index=st.integers(0, 10**6))
def test_tokens_without_probability_are_never_drawn(row: list[float], s: Sampling, seed: int, index: int) -> None:
    p = next_token_distribution(torch.tensor([row]), [s])
    chosen = int(draw(p, torch.tensor([seed]), torch.tensor([index]), 0))
    assert chosen < 9
    assert float(p[0, chosen]) > 0


@pytest.mark.parametrize(
    "values",
    [{"temperature": x} for x in (-0.1, math.nan, math.inf)]
    + [{name: x} for name in ("top_p", "typical_p") for x in (0.0, -1.0, 1.01, math.nan)]
    + [{"top_k": -1}, {"min_p": 1.5}, {"repetition_penalty": 0.0}, {"frequency_penalty": math.nan}]
    + [{"no_repeat_ngram_size": -1}, {"logit_bias": {"a": 1.0}}, {"forced_tokens": (1,), "suppress_tokens": (1,)}],
    ids=str,
)
def test_sampling_value_out_of_range_is_a_user_error(values: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(values))):
        Sampling(**values)  # type: ignore[arg-type]


def test_penalties_do_not_depend_on_the_default_dtype() -> None:
    logits, sampling = torch.zeros(1, 3, dtype=torch.float32), Sampling(1.0, frequency_penalty=0.5)
    p = next_token_distribution(logits, sampling, [[0, 1, 1]], [1])
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(next_token_distribution(logits, sampling, [[0, 1, 1]], [1]), p)
    finally:
        torch.set_default_dtype(torch.float32)


def test_draws_of_neighboring_tokens_and_indices_are_independent() -> None:
    """Of two equally likely tokens among many, each is drawn half of the time, independently of other draws."""
    n = 20_000
    p = torch.zeros(n, 64)
    p[:, [20, 21]] = 0.5
    seeds, index = torch.full((n,), 3), torch.arange(n)
    first = (draw(p, seeds, index, 0) == 20).double()
    assert abs(float(first.mean()) - 0.5) < 0.012
    assert abs(float(torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1])) < 0.025
    for other in draw(p, seeds + 1, index, 0), draw(p, seeds, index, 1), draw(p.roll(2, 1), seeds, index, 0) - 2:
        assert abs(float(torch.corrcoef(torch.stack([first, (other == 20).double()]))[0, 1])) < 0.025


def test_draw_changes_only_where_two_tokens_nearly_tie() -> None:
    """Rounding of 1e-6 in the logits changes about one draw in a million, at any size of the vocabulary."""
    torch.manual_seed(0)
    for rows, size in (20_000, 23), (100, 50_000):
        logits = torch.randn(rows, size) * 3
        near = logits * (1 + 1e-6 * torch.randn_like(logits))
        seeds, index = torch.arange(len(logits)), torch.zeros(len(logits), dtype=torch.long)
        both = [draw(z.softmax(-1), seeds, index, 0) for z in (logits, near)]
        assert torch.equal(*both)
