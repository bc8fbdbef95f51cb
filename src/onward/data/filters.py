"""Quality filters for documents, from Gopher (Rae et al. 2021, appendix A.1); RefinedWeb (Penedo et al. 2023) also uses
them. Words are separated by white space."""

import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial

import numpy as np

from onward.base.splitmix import GOLDEN
from onward.data.cleaning import GOPHER, Filters


def failed_filter(filters: Filters, text: str) -> str:
    """Name of the first filter that drops the document, such as "min_words"; "" if no filter drops it."""
    document = Document(text)
    for name, measure, limit in active_filters(filters):
        value = measure(document)
        if value < limit if name.startswith("min") else value > limit:
            return name
    return ""


@cache
def active_filters(filters: Filters) -> list[tuple[str, Callable[["Document"], float], float]]:
    """Return (name, measure, limit) of each active filter."""
    active: list[tuple[str, Callable[[Document], float], float]] = []
    for name, measure in MEASURES.items():
        limit = getattr(filters, name)
        limit = GOPHER[name] if filters.gopher and limit in (None, ()) else limit
        if isinstance(limit, tuple):  # one limit for each n, from the smallest n that Gopher uses
            first = 2 if name == "max_top_ngrams" else 5
            active += [(name, partial(measure, n=n), one) for n, one in enumerate(limit, first)]
        elif limit is not None:
            active.append((name, measure, limit))
    return active


class Document:
    """A text to be filtered, with its W words, its lines and its paragraphs."""

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
        """Number of characters of each word, (W,)."""
        return np.fromiter(map(len, self.words), np.int64, len(self.words))

    def ngram_hashes(self, n: int) -> np.ndarray:
        """A hash of each n-gram of words, (W - n + 1,) uint64."""
        count = max(0, len(self.words) - n + 1)
        keys = np.zeros(count, np.uint64)
        for i in range(n):
            keys = keys * np.uint64(GOLDEN) + self.word_ids[i : i + count]
        return keys

    @cached_property
    def word_ids(self) -> np.ndarray:
        ids = {word: number for number, word in enumerate(dict.fromkeys(self.words), 1)}
        return np.fromiter(map(ids.__getitem__, self.words), np.uint64, len(self.words))

    def top_ngram(self, n: int) -> float:
        """Fraction of the characters in occurrences of the most frequent n-gram; 0 if none occurs twice."""
        _, first, counts = np.unique(self.ngram_hashes(n), return_index=True, return_counts=True)
        if counts.max(initial=1) == 1:
            return 0.0
        common = first[counts == counts.max()]
        return max(int(self.lengths[i : i + n].sum()) for i in common) * int(counts.max()) / int(self.lengths.sum())

    def repeated_ngrams(self, n: int) -> float:
        """Fraction of the characters in n-grams that repeat an earlier one; each character counts once."""
        hashes = self.ngram_hashes(n)
        repeated = np.ones(len(hashes), bool)
        repeated[np.unique(hashes, return_index=True)[1]] = False
        inside = np.zeros(len(self.words), bool)
        for i in range(n):
            inside[i : i + len(hashes)] |= repeated
        return fraction(int(self.lengths[inside].sum()), int(self.lengths.sum()))


def fraction(part: float, total: float) -> float:
    return part / total if total else 0.0


def repeated(parts: Sequence[str]) -> float:
    """Fraction of the texts that repeat an earlier one."""
    return fraction(len(parts) - len(set(parts)), len(parts))


def repeated_text(parts: Sequence[str]) -> float:
    """Fraction of the characters in texts that repeat an earlier one."""
    total = sum(map(len, parts))
    return fraction(total - sum(map(len, set(parts))), total)


STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
BULLETS = tuple("-*•‣▪●◦")
ELLIPSES = "...", "…"
# The value that each filter compares with its limit.
MEASURES: dict[str, Callable[..., float]] = {
    "min_words": lambda doc: len(doc.words),
    "max_words": lambda doc: len(doc.words),
    "min_word_length": lambda doc: fraction(int(doc.lengths.sum()), len(doc.words)),
    "max_word_length": lambda doc: fraction(int(doc.lengths.sum()), len(doc.words)),
    "max_symbols": lambda doc: fraction(max(doc.text.count("#"), sum(map(doc.text.count, ELLIPSES))), len(doc.words)),
    "max_bullets": lambda doc: fraction(sum(line.startswith(BULLETS) for line in doc.lines), len(doc.lines)),
    "max_ellipses": lambda doc: fraction(sum(line.endswith(ELLIPSES) for line in doc.lines), len(doc.lines)),
    "min_alphabetic": lambda doc: fraction(sum(any(map(str.isalpha, w)) for w in doc.words), len(doc.words)),
    "min_stop_words": lambda doc: len(STOP_WORDS & set(map(str.lower, doc.words))),
    "max_repeated_lines": lambda doc: repeated(doc.lines),
    "max_repeated_line_text": lambda doc: repeated_text(doc.lines),
    "max_repeated_paragraphs": lambda doc: repeated(doc.paragraphs),
    "max_repeated_paragraph_text": lambda doc: repeated_text(doc.paragraphs),
    "max_top_ngrams": Document.top_ngram,
    "max_repeated_ngrams": Document.repeated_ngrams,
}
