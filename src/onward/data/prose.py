"""Prose in Python source files: comments and docstrings, in paragraphs, without code, markup and licenses. Imports
nothing heavy."""

import re
from collections.abc import Iterable, Iterator

PARAGRAPHS = re.compile(r"\n\s*\n")
LICENSE = re.compile(r"copyright|licen[sc]e|all rights reserved|permission is hereby|warrant|redistribut|spdx", re.I)
NOT_PROSE = re.compile(r"[-=#*~+/.]{5}|>>>|^\s*(\.\.|:)", re.M)  # rules, ellipses, examples, directives and fields
CODE = re.compile(r"[=(){}\[\];_\\<>|]")
MIN_CHARS, MIN_WORDS, MIN_LETTERS, MAX_CODE = 40, 7, 0.8, 0.04  # of a paragraph of prose; the last two are shares
RUN = 8  # words in a row that no paragraph shares with a held-out text


def comments(source: str) -> Iterator[str]:
    """Yield the text of each block of consecutive comment lines in the source text of a Python module, without # and
    indentation."""
    block: list[str] = []
    for line in (*source.splitlines(), ""):
        text = line.strip()
        if text.startswith("#"):
            block.append(text.lstrip("#").removeprefix(" "))
        elif block:
            yield "\n".join(block)
            block = []


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text, which are separated by blank lines."""
    return PARAGRAPHS.split(text)


def words(text: str) -> str:
    """Return a text with each stretch of white space as one space."""
    return " ".join(text.split())


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """Yield each run of RUN words of a text; the case of letters, punctuation and white space do not count."""
    found = re.findall(r"\w+", text.lower())
    return zip(*(found[start:] for start in range(RUN)))


def is_prose(text: str) -> bool:
    """Return whether a paragraph is English prose, judged by its length and its characters: no code, example, table,
    markup or license."""
    line = words(text)
    if len(line) < MIN_CHARS or line.count(" ") + 1 < MIN_WORDS or NOT_PROSE.search(text) or LICENSE.search(line):
        return False
    letters = sum(map(str.isalpha, line)) + line.count(" ")
    return letters > MIN_LETTERS * len(line) and len(CODE.findall(line)) < MAX_CODE * len(line)


class NewProse:
    """The paragraphs of prose that are neither in the texts read before nor near to a held-out text."""

    def __init__(self, known: Iterable[str], held_out: Iterable[str]) -> None:
        """`known` are texts whose paragraphs are not new; paragraphs that share RUN words in a row with a text of
        `held_out` are dropped, too."""
        self.known = {words(paragraph) for text in known for paragraph in paragraphs(text)}
        self.held_out = {run for text in held_out for run in runs(text)}

    def of(self, text: str) -> str:
        """Return the paragraphs of a text that are new prose, from now on known; "" if there is none."""
        return "\n\n".join(paragraph for paragraph in paragraphs(text) if self.is_new(paragraph))

    def is_new(self, paragraph: str) -> bool:
        if not is_prose(paragraph) or (line := words(paragraph)) in self.known:
            return False
        self.known.add(line)
        return self.held_out.isdisjoint(runs(paragraph))
