"""Which documents are worth learning from: the filters of Gopher (Rae et al. 2021, section A1), which RefinedWeb
(Penedo et al. 2023) takes over. Words are what white space separates.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial

import numpy as np

from onward.data.cleaning import GOPHER, Filters


def fault(filters: Filters, text: str) -> str:
    """The name of the first filter that drops a document, or ""."""
    page = Page(text)
    for name, measure, limit in checks(filters):
        value = measure(page)
        if value < limit if name.startswith("min") else value > limit:
            return name
    return ""


@cache
def checks(filters: Filters) -> list[tuple[str, Callable[["Page"], float], float]]:
    """The name, the measure and the limit of each filter that is on."""
    found: list[tuple[str, Callable[[Page], float], float]] = []
    for name, measure in MEASURES.items():
        limit = getattr(filters, name)
        limit = GOPHER[name] if filters.gopher and limit in (None, ()) else limit
        if isinstance(limit, tuple):  # one for each length of runs of words, from the smallest that Gopher looks at
            first = 2 if name == "max_top_ngrams" else 5
            found += [(name, partial(measure, n=n), one) for n, one in enumerate(limit, first)]
        elif limit is not None:
            found.append((name, measure, limit))
    return found


class Page:
    """A document and its words, lines and paragraphs."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        return [line for part in self.text.split("\n") if (line := part.strip())]

    @cached_property
    def paragraphs(self) -> list[str]:
        return [paragraph for part in re.split(r"\n\s*\n", self.text) if (paragraph := part.strip())]

    @cached_property
    def lengths(self) -> np.ndarray:
        """The characters of each word, (W,)."""
        return np.fromiter(map(len, self.words), np.int64, len(self.words))

    def runs(self, n: int) -> np.ndarray:
        """A hash of the n words from each place on, (W - n + 1,) or empty."""
        count = max(0, len(self.words) - n + 1)
        keys = np.zeros(count, np.uint64)
        for i in range(n):
            keys = keys * np.uint64(0x9E3779B97F4A7C15) + self.numbers[i : i + count]
        return keys

    @cached_property
    def numbers(self) -> np.ndarray:
        """A number for each word, the same for equal ones."""
        known = {word: number for number, word in enumerate(dict.fromkeys(self.words), 1)}
        return np.fromiter(map(known.__getitem__, self.words), np.uint64, len(self.words))

    def top(self, n: int) -> float:
        """The share of the characters that is in the commonest run of n words, 0 if none is there twice."""
        _, places, counts = np.unique(self.runs(n), return_index=True, return_counts=True)
        if counts.max(initial=1) == 1:
            return 0.0
        common = places[counts == counts.max()]
        return max(int(self.lengths[i : i + n].sum()) for i in common) * int(counts.max()) / int(self.lengths.sum())

    def repeated(self, n: int) -> float:
        """The share of the characters that is in runs of n words that were there before, each counted once."""
        keys = self.runs(n)
        again = np.ones(len(keys), bool)
        again[np.unique(keys, return_index=True)[1]] = False
        inside = np.zeros(len(self.words), bool)
        for i in range(n):
            inside[i : i + len(keys)] |= again
        return share(int(self.lengths[inside].sum()), int(self.lengths.sum()))


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def again(parts: Sequence[str]) -> float:
    """The share of the parts that were there before."""
    return share(len(parts) - len(set(parts)), len(parts))


def text_again(parts: Sequence[str]) -> float:
    """The share of the parts' characters in those that were there before."""
    whole = sum(map(len, parts))
    return share(whole - sum(map(len, set(parts))), whole)


STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
BULLETS = tuple("-*•‣▪●◦")
ELLIPSES = "...", "…"
MEASURES: dict[str, Callable[..., float]] = {
    "min_words": lambda page: len(page.words),
    "max_words": lambda page: len(page.words),
    "min_word_length": lambda page: share(int(page.lengths.sum()), len(page.words)),
    "max_word_length": lambda page: share(int(page.lengths.sum()), len(page.words)),
    "max_symbols": lambda page: share(max(page.text.count("#"), sum(map(page.text.count, ELLIPSES))), len(page.words)),
    "max_bullets": lambda page: share(sum(line.startswith(BULLETS) for line in page.lines), len(page.lines)),
    "max_ellipses": lambda page: share(sum(line.endswith(ELLIPSES) for line in page.lines), len(page.lines)),
    "min_alphabetic": lambda page: share(sum(any(map(str.isalpha, w)) for w in page.words), len(page.words)),
    "min_stop_words": lambda page: len(STOP_WORDS & set(map(str.lower, page.words))),
    "max_repeated_lines": lambda page: again(page.lines),
    "max_repeated_line_text": lambda page: text_again(page.lines),
    "max_repeated_paragraphs": lambda page: again(page.paragraphs),
    "max_repeated_paragraph_text": lambda page: text_again(page.paragraphs),
    "max_top_ngrams": Page.top,
    "max_repeated_ngrams": Page.repeated,
}
