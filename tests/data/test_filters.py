"""Each filter drops what it is for."""

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.data.cleaning import GOPHER, Cleaning, Filters
from onward.data.filters import Page, fault
from onward.fields import docs

SENTENCE = (
    "the of old river city and stone a green boats water be have with people market morning light that garden "
    "mountain winter travels"
)
WORDS = SENTENCE.split()
GOOD = "\n\n".join(
    " ".join(words) for words in zip(*[iter(word + end for end in ("", "s", "ed") for word in WORDS)] * 6)
)
BAD = {
    "min_words": "the old river and stone",
    "max_words": " ".join(f"{word}{i}" for i in range(5000) for word in WORDS),
    "min_word_length": GOOD + " a" * 100,
    "max_word_length": GOOD + " " + "extraordinarily-" * 50,
    "max_symbols": GOOD + " #tag" * 10,
    "max_bullets": "\n".join(f"- {line}" for line in GOOD.split("\n") if line),
    "max_ellipses": GOOD.replace("\n\n", "...\n\n"),
    "min_alphabetic": GOOD + "".join(f" {i}" for i in range(1000, 1040)),
    "min_stop_words": re.sub(r"\b(the|be|to|of|and|that|have|with)\b", "bridge", GOOD),
    "max_repeated_lines": GOOD + "\nyes" * 10,
    "max_repeated_line_text": GOOD + ("\n" + SENTENCE) * 3,
    "max_repeated_paragraphs": GOOD + "\n\nyes" * 10,
    "max_repeated_paragraph_text": GOOD + ("\n\n" + SENTENCE) * 3,
    "max_top_ngrams": GOOD + " round and round" * 8,
    "max_repeated_ngrams": GOOD + " " + GOOD,
}
LIMITS: dict[str, Any] = {**GOPHER}


@pytest.mark.parametrize("name", GOPHER)
def test_a_filter_drops_what_it_is_for_and_keeps_what_is_good(name: str) -> None:
    alone = Filters(**{name: LIMITS[name]})
    assert fault(alone, BAD[name]) == name
    assert fault(alone, GOOD) == ""


def test_gopher_turns_all_of_them_on_and_a_given_value_counts_before_its_own() -> None:
    gopher = Filters(gopher=True)
    assert all(fault(gopher, text) for text in BAD.values())
    assert fault(gopher, GOOD) == ""
    assert fault(Filters(gopher=True, min_words=100), GOOD) == "min_words"


def test_each_filter_is_off_by_default() -> None:
    assert not any(fault(Filters(), text) for text in BAD.values())
    assert not Cleaning(exact=False).judges
    asked: list[dict[str, Any]] = [
        {"exact": True},
        {"near": 0.8},
        {"gopher": True},
        *({name: limit} for name, limit in GOPHER.items()),
    ]
    assert all(Cleaning(**{"exact": False} | one).judges for one in asked)


def test_the_help_tells_gophers_values() -> None:
    for name, told in docs(Filters).items():
        if said := re.search(r"\(Gopher: (.*)\)", told):
            values = limit if isinstance(limit := GOPHER[name], tuple) else (limit,)
            assert tuple(map(float, said[1].split())) == tuple(map(float, values)), name
        else:
            assert name not in GOPHER or "the same" in told, name


@given(words=st.lists(st.sampled_from(["a", "bb", "ccc"]), max_size=12), n=st.integers(2, 5))
def test_runs_of_words_are_measured_as_if_by_hand(words: list[str], n: int) -> None:
    page, total = Page(" ".join(words)), sum(map(len, words))
    runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    counts = Counter(runs)
    most = max(counts.values(), default=0)
    longest = max((sum(map(len, run)) for run, count in counts.items() if count == most), default=0)
    assert page.top(n) == pytest.approx(longest * most / total if most > 1 else 0)
    again = {i + k for i, run in enumerate(runs) if run in runs[:i] for k in range(n)}
    assert page.repeated(n) == pytest.approx(sum(len(words[i]) for i in again) / total if total else 0)


@given(st.text())
def test_any_text_can_be_measured(text: str) -> None:
    assert fault(Filters(gopher=True), text) in GOPHER
