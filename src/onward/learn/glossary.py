"""The glossary: the terms of the field in one sentence each, one source for `onward help` and the site."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "glossary.toml"
QUESTION = re.compile(r"(?:what|whats|is|are|how|does|do|works?|explain|an?|the)", re.IGNORECASE)  # not part of a term


@dataclass(frozen=True)
class Entry:
    """A term of the glossary."""

    name: str
    text: str  # one sentence
    chapter: int  # chapter of the course that teaches the term
    code: str = ""  # name in Onward: a public name, option, command or file; "": no name
    also: tuple[str, ...] = ()  # other names for the term
    guide: str = ""  # a page of docs/ about the term, without .md

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.also)


@cache
def glossary() -> Sequence[Entry]:
    """Return all entries of the glossary, sorted by name."""
    with FILE.open("rb") as file:
        rows = tomllib.load(file)["term"]
    return sorted((Entry(**row | {"also": tuple(row.get("also", ()))}) for row in rows), key=lambda e: e.name.lower())


def plain(name: str) -> str:
    # a search for CausalSelfAttention finds causal self-attention
    return "".join(c for c in name.lower() if c.isalnum())


def asked(text: str) -> str:
    """The term in a question: "KV cache" for "What is a KV cache?"."""
    return " ".join(word for word in text.replace("?", " ").split() if not QUESTION.fullmatch(word))


def find(text: str) -> list[Entry]:
    """The entries with this name, its singular or its plural, ignoring case, spaces and punctuation; or else those with
    the term that the question `text` asks for; or else the entries of `mentioning`."""
    for letters in plain, lambda text: plain(asked(text)):
        word = letters(text)
        for form in (word, word.removesuffix("s"), word.removesuffix("es"), f"{word}s"):
            if entries := [entry for entry in glossary() if form in map(letters, entry.names)]:
                return entries
    return mentioning(text)


def mentioning(text: str) -> list[Entry]:
    """The entries with a name in which a word begins with the term that `text` asks for, first those whose names begin
    with it; none if the term has fewer than three letters."""
    word = asked(text).lower()
    if len(plain(word)) < 3:
        return []
    found = [entry for entry in glossary() if any(f" {word}" in f" {name.lower()}" for name in entry.names)]
    begins = lambda name: name.lower().startswith(word)
    return sorted(found, key=lambda entry: (not begins(entry.name), not any(map(begins, entry.also))))


def nearest_terms(word: str) -> str:
    """The end of an error message: similar terms, or where to look."""
    names = {plain(name): name for entry in glossary() for name in entry.names}
    close = [names[one] for one in get_close_matches(plain(asked(word)), names, 3, cutoff=0.55)]
    return f"did you mean {' or '.join(close)}?" if close else "onward learn lists the chapters"
