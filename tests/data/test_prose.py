"""Prose in Python source files: finds comments, recognizes prose paragraphs, and removes repeated paragraphs."""

import pytest

from onward.data.prose import NewProse, comments, is_prose

SENTENCE = "The parser reads one line at a time, so that a file may be larger than memory."
MODULE = """#!/usr/bin/env python
# The first block
#   of two lines.
import os

def f():
    # Inside a function.
    return os  # beside code
    #
"""


def test_comments_are_blocks_of_lines_without_code() -> None:
    assert [*comments(MODULE)] == ["!/usr/bin/env python\nThe first block\n  of two lines.", "Inside a function.", ""]


@pytest.mark.parametrize(
    ("text", "prose"),
    [
        (SENTENCE, True),
        (SENTENCE.replace(", ", ",\n"), True),
        ("Too short to be prose.", False),
        ("one-very-long-word-without-any-spaces-in-it of three", False),
        ("if x[i] == y[j]: return self.items[key](value) or {} and so on and so on", False),
        (">>> print('The parser reads one line at a time')", False),
        (f".. note:: {SENTENCE}", False),
        (f"------------\n{SENTENCE}", False),
        (f"Copyright (c) by its authors. {SENTENCE}", False),
        ("Licensed to the foundation under a contributor agreement of the year", False),
        ("", False),
    ],
)
def test_prose_is_told_from_code_markup_and_licenses(text: str, prose: bool) -> None:
    assert is_prose(text) == prose


def test_each_new_paragraph_is_given_once() -> None:
    other, known = SENTENCE.replace("parser", "scanner"), SENTENCE.replace("parser", "tokenizer")
    prose = NewProse([f"x = 1\n\n{known}"], [])
    assert prose.of(f"{SENTENCE}\n\nx = 1\n\n{known}\n \n{other}") == f"{SENTENCE}\n\n{other}"
    assert prose.of(SENTENCE.replace(" ", "\n  ")) == ""


@pytest.mark.parametrize(("shared", "kept"), [(7, True), (8, False)])
def test_paragraph_that_shares_eight_words_with_a_held_out_text_is_dropped(shared: int, kept: bool) -> None:
    words = SENTENCE.split()[:shared]
    paragraph = f"Elsewhere it is said: {' '.join(words).upper()}; and then comes something that is not there."
    assert bool(NewProse([], [SENTENCE]).of(paragraph)) == kept
