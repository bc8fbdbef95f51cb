"""The glossary: the terms of the field in one sentence each, one source for `onward help` and the site."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "glossary.toml"
QUESTION = re.compile(r"(?:what|what'?s|is|are|how|does|do|works?|explain|an?|the)", re.IGNORECASE)  # not of a term


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


@cache
def plain(name: str) -> str:
    # a search for CausalSelfAttention finds causal self-attention, and one for normalisation, normalization
    return re.sub("is(?=e|ation)", "iz", "".join(c for c in name.lower() if c.isalnum()))


@cache
def asked(text: str) -> str:
    """The term in a question: "KV cache" for "What is a KV cache?"."""
    return " ".join(word for word in text.replace("?", " ").split() if not QUESTION.fullmatch(word))


def where_to_look(question: str) -> str:
    """Advice for a question or a term that was given as a command; "" for other words."""
    if find(term := asked(question)):
        return f"onward help {term} explains the term"
    is_question = QUESTION.fullmatch(question.split(maxsplit=1)[0])
    return "onward help TERM explains a term, and onward learn lists the chapters" if is_question else ""


def find(text: str) -> list[Entry]:
    """The entries with this name, its singular or its plural, ignoring case, spaces and punctuation; or else those with
    the term that the question `text` asks for; or else the entries of `mentioning`; or else that of `contained`."""
    for letters in plain, lambda text: plain(asked(text)):
        word = letters(text)
        for form in forms(word):
            if entries := [entry for entry in glossary() if form in map(letters, entry.names)]:
                return entries
    return mentioning(text) or contained(text)


def forms(word: str) -> list[str]:
    """The word, its singulars and its plural."""
    return [word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word), f"{word}s"]


def contained(text: str) -> list[Entry]:
    """The entry with the longest name, in words, that `text` contains: of several, the first in the text. Names of one
    letter do not count."""
    named = {plain(name): entry for entry in glossary() for name in entry.names}
    words = re.findall(r"[\w.+]+", asked(text).replace("'s", ""))
    for count in range(len(words), 0, -1):
        for first in range(len(words) - count + 1):
            joined = plain(" ".join(words[first : first + count]))
            for form in forms(joined) if len(joined) > 1 else ():
                if form in named:
                    return [named[form]]
    return []


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
    names = {plain(name): name for entry in glossary() for name in entry.names if len(plain(name)) > 3}
    close = [names[one] for one in get_close_matches(plain(asked(word)), names, 2, cutoff=0.75)]
    return f"did you mean {' or '.join(close)}?" if close else "onward learn lists the chapters"
