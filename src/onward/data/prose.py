"""Prose in Python source files: comments and docstrings, in paragraphs, without code, markup and licenses. Importing
this module does not import torch."""

import re
from collections.abc import Iterable, Iterator

PARAGRAPHS = re.compile(r"\n\s*\n")
LICENSE = re.compile(r"copyright|licen[sc]e|all rights reserved|permission is hereby|warrant|redistribut|spdx", re.I)
NOT_PROSE = re.compile(r"[-=#*~+/.]{5}|>>>|^\s*(\.\.|:)", re.M)  # rules, ellipses, examples, directives and fields
CODE = re.compile(r"[=(){}\[\];_\\<>|]")
MIN_CHARS, MIN_WORDS, MIN_LETTERS, MAX_CODE = 40, 7, 0.8, 0.04  # limits of a paragraph; the last two are fractions
RUN = 8  # a paragraph is dropped if it shares this many words in a row with a held-out text


def comments(source: str) -> Iterator[str]:
    """Each block of consecutive comment lines in a module's source, without # and indentation."""
    block: list[str] = []
    for line in (*source.splitlines(), ""):
        text = line.strip()
        if text.startswith("#"):
            block.append(text.lstrip("#").removeprefix(" "))
        elif block:
            yield "\n".join(block)
            block = []


def paragraphs(text: str) -> list[str]:
    return PARAGRAPHS.split(text)


def words(text: str) -> str:
    return " ".join(text.split())


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """Each sequence of RUN consecutive words, in lower case and without punctuation."""
    lowered = re.findall(r"\w+", text.lower())
    return zip(*(lowered[start:] for start in range(RUN)))


def is_prose(text: str) -> bool:
    line = words(text)
    if len(line) < MIN_CHARS or line.count(" ") + 1 < MIN_WORDS or NOT_PROSE.search(text) or LICENSE.search(line):
        return False
    letters = sum(map(str.isalpha, line)) + line.count(" ")
    return letters > MIN_LETTERS * len(line) and len(CODE.findall(line)) < MAX_CODE * len(line)


class NewProse:
    """Selects paragraphs of prose that occur neither in earlier texts nor, in part, in a held-out text."""

    def __init__(self, known: Iterable[str], held_out: Iterable[str]) -> None:
        self.known = {words(paragraph) for text in known for paragraph in paragraphs(text)}
        self.held_out = {run for text in held_out for run in runs(text)}

    def of(self, text: str) -> str:
        """The paragraphs that are new prose, joined into one text; "" if there are none. They count as known in later
        calls."""
        return "\n\n".join(paragraph for paragraph in paragraphs(text) if self.is_new(paragraph))

    def is_new(self, paragraph: str) -> bool:
        if not is_prose(paragraph) or (line := words(paragraph)) in self.known:
            return False
        self.known.add(line)
        return self.held_out.isdisjoint(runs(paragraph))
