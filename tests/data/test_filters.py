"""The quality filters for documents."""

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.base.fields import docs
from onward.data.cleaning import GOPHER, Cleaning, Filters
from onward.data.filters import Document, failed_filter

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
def test_filter_drops_its_bad_document_and_keeps_the_good_one(name: str) -> None:
    alone = Filters(**{name: LIMITS[name]})
    assert failed_filter(alone, BAD[name]) == name
    assert failed_filter(alone, GOOD) == ""


def test_gopher_turns_all_filters_on_and_explicit_limits_take_precedence() -> None:
    gopher = Filters(gopher=True)
    assert all(failed_filter(gopher, text) for text in BAD.values())
    assert failed_filter(gopher, GOOD) == ""
    assert failed_filter(Filters(gopher=True, min_words=100), GOOD) == "min_words"


def test_filters_are_off_by_default() -> None:
    assert not any(failed_filter(Filters(), text) for text in BAD.values())
    assert not Cleaning(exact=False).drops_documents
    options: list[dict[str, Any]] = [
        {"exact": True},
        {"near": 0.8},
        {"gopher": True},
        *({name: limit} for name, limit in GOPHER.items()),
    ]
    assert all(Cleaning(**{"exact": False} | one).drops_documents for one in options)


def test_help_states_the_limits_of_gopher() -> None:
    for name, text in docs(Filters).items():
        if match := re.search(r"\(Gopher: (.*)\)", text):
            values = limit if isinstance(limit := GOPHER[name], tuple) else (limit,)
            assert tuple(map(float, match[1].split())) == tuple(map(float, values)), name
        else:
            assert name not in GOPHER, name


@given(words=st.lists(st.sampled_from(["a", "bb", "ccc"]), max_size=12), n=st.integers(2, 5))
def test_ngram_fractions_equal_a_count_by_hand(words: list[str], n: int) -> None:
    document, total = Document(" ".join(words)), sum(map(len, words))
    ngrams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    counts = Counter(ngrams)
    most = max(counts.values(), default=0)
    longest = max((sum(map(len, ngram)) for ngram, count in counts.items() if count == most), default=0)
    assert document.top_ngram(n) == pytest.approx(longest * most / total if most > 1 else 0)
    repeated = {i + k for i, ngram in enumerate(ngrams) if ngram in ngrams[:i] for k in range(n)}
    assert document.repeated_ngrams(n) == pytest.approx(sum(len(words[i]) for i in repeated) / total if total else 0)


@given(st.text())
def test_short_texts_fail_some_filter(text: str) -> None:
    assert failed_filter(Filters(gopher=True), text) in GOPHER
