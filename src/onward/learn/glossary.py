"""The glossary: the terms of the field in one sentence each, one source for `onward help` and the site."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "glossary.toml"


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


def find(word: str) -> list[Entry]:
    """The entries with this name or its singular, ignoring case, spaces and punctuation, or else the entries of
    `mentioning`."""
    for form in (plain(word), plain(word).removesuffix("s"), plain(word).removesuffix("es")):
        if entries := [entry for entry in glossary() if form in map(plain, entry.names)]:
            return entries
    return mentioning(word)


def mentioning(word: str) -> list[Entry]:
    """The entries with a name in which a word begins with `word`; none if `word` has fewer than three letters."""
    if len(plain(word)) < 3:
        return []
    return [entry for entry in glossary() if any(f" {word.lower()}" in f" {name.lower()}" for name in entry.names)]


def nearest_terms(word: str) -> str:
    """The end of an error message: similar terms, or where to look."""
    names = {plain(name): name for entry in glossary() for name in entry.names}
    close = [names[one] for one in get_close_matches(plain(word), names, 3, cutoff=0.55)]
    return f"did you mean {' or '.join(close)}?" if close else "onward learn lists the chapters"
