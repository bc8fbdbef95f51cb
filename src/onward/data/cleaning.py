"""Settings of cleaning: filters and deduplication. Imports nothing heavy."""

from dataclasses import dataclass

from onward.base.errors import UserError


@dataclass(frozen=True)
class Filters:
    """Limits on the documents that are kept. A limit without a value is off; with `gopher`, it is Gopher's limit."""

    gopher: bool = False  # apply Gopher's limits to options without a value
    min_words: int | None = None  # minimum number of words (Gopher: 50)
    max_words: int | None = None  # maximum number of words (Gopher: 100000)
    min_word_length: float | None = None  # minimum mean number of characters per word (Gopher: 3)
    max_word_length: float | None = None  # maximum mean number of characters per word (Gopher: 10)
    max_symbols: float | None = None  # maximum number of # characters, or of ellipses, per word (Gopher: 0.1)
    max_bullets: float | None = None  # maximum fraction of lines that begin with a bullet (Gopher: 0.9)
    max_ellipses: float | None = None  # maximum fraction of lines that end with an ellipsis (Gopher: 0.3)
    min_alphabetic: float | None = None  # minimum fraction of words with a letter (Gopher: 0.8)
    min_stop_words: int | None = None  # minimum number of different common English words, such as "the" (Gopher: 2)
    max_repeated_lines: float | None = None  # maximum fraction of lines that repeat an earlier line (Gopher: 0.3)
    max_repeated_line_text: float | None = None  # maximum fraction of text in repeated lines (Gopher: 0.2)
    max_repeated_paragraphs: float | None = None  # maximum fraction of repeated paragraphs (Gopher: 0.3)
    max_repeated_paragraph_text: float | None = None  # maximum fraction of text in repeated paragraphs (Gopher: 0.2)
    max_top_ngrams: tuple[float, ...] = ()  # maximum fraction of text in the top 2-, 3-, 4-gram (Gopher: 0.2 0.18 0.16)
    max_repeated_ngrams: tuple[float, ...] = ()  # of text in repeated 5-10-grams (Gopher: 0.15 0.14 0.13 0.12 0.11 0.1)


@dataclass(frozen=True)
class Cleaning(Filters):
    """Which documents to drop: those that fail a filter, and duplicates of earlier documents in any source."""

    exact: bool = True  # drop documents that equal an earlier one
    near: float | None = None  # drop documents at least this similar (0 to 1, MinHash) to an earlier one; recall 95 %

    def __post_init__(self) -> None:
        if self.near is not None and not 0 < self.near <= 1:
            raise UserError(f"near is {self.near}: give a similarity above 0 and at most 1")

    @property
    def drops_documents(self) -> bool:
        filters = any(getattr(self, name) not in (None, ()) for name in GOPHER)
        return self.exact or self.near is not None or self.gopher or filters


GOPHER: dict[str, float | tuple[float, ...]] = {
    "min_words": 50,
    "max_words": 100_000,
    "min_word_length": 3,
    "max_word_length": 10,
    "max_symbols": 0.1,
    "max_bullets": 0.9,
    "max_ellipses": 0.3,
    "min_alphabetic": 0.8,
    "min_stop_words": 2,
    "max_repeated_lines": 0.3,
    "max_repeated_line_text": 0.2,
    "max_repeated_paragraphs": 0.3,
    "max_repeated_paragraph_text": 0.2,
    "max_top_ngrams": (0.2, 0.18, 0.16),
    "max_repeated_ngrams": (0.15, 0.14, 0.13, 0.12, 0.11, 0.1),
}
