"""User-supplied regular expressions match as in Python's re, with limits on time and memory."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import UserError
from onward.evaluation import Question
from onward.evaluation.tasks.files import Answers
from onward.text import regular
from onward.text.regular import compiled, matches

PATTERNS = [
    r"\d{1,3}(\.\d{1,3}){3}",
    "a.b",
    "(?i)yes|no",
    r"(?P<q>['\"]).*?(?P=q)",
    r"(?=.*a)\w+",
    r"[^\W_]+",
    "",
    r"\s*",
]


@given(st.sampled_from(PATTERNS), st.text("ab1.'\"_ \nYESno", max_size=12))
def test_a_match_is_that_of_python(pattern: str, text: str) -> None:
    python = re.compile(pattern, re.DOTALL)
    assert matches(pattern, text) == (python.fullmatch(text) is not None)
    assert matches(pattern, text, full=False) == (python.search(text) is not None)


def test_a_match_that_takes_too_long_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular, "SECONDS", 0.1)
    assert not matches("(a|aa)+", "a" * 60 + "b")
    assert matches("(a|aa)+", "a" * 60)
    task = Answers("questions.jsonl", match="regex")
    assert not task.is_right("a" * 60 + "b", Question("?", expected="(a|aa)+"))


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("(", r"not a regular expression: missing \) at position 1"),
        ("a**", "not a regular expression: multiple repeat"),
        ("(" * 5000, "not a regular expression: maximum recursion depth"),
        ("a{1000001}", "repeats a part more than 1,000,000 times"),
        ("((a{1000}){1000}){2}", "repeats a part more than 1,000,000 times"),
        ("(a{,2000}){501,}", "repeats a part more than 1,000,000 times"),
    ],
)
def test_a_pattern_that_cannot_be_matched_is_one_sentence(pattern: str, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^here is .*{sentence}") as info:
        compiled(pattern, "here")
    assert len(str(info.value)) < 300
