"""Which documents are left out, as a value. Imports nothing heavy."""

from dataclasses import dataclass

from onward.errors import UserError


@dataclass(frozen=True)
class Filters:
    """What a document must be like to be kept. Each is off until it is given, or --gopher gives all of them."""

    gopher: bool = False  # Gopher's values for those that are not given
    min_words: int | None = None  # least number of words (Gopher: 50)
    max_words: int | None = None  # greatest number of words (Gopher: 100000)
    min_word_length: float | None = None  # least mean length of words, in characters (Gopher: 3)
    max_word_length: float | None = None  # greatest mean length of words (Gopher: 10)
    max_symbols: float | None = None  # greatest number of #, and of ellipses, per word (Gopher: 0.1)
    max_bullets: float | None = None  # greatest share of lines that begin with a bullet (Gopher: 0.9)
    max_ellipses: float | None = None  # greatest share of lines that end with an ellipsis (Gopher: 0.3)
    min_alphabetic: float | None = None  # least share of words with a letter (Gopher: 0.8)
    min_stop_words: int | None = None  # least number of the commonest words of English, such as the (Gopher: 2)
    max_repeated_lines: float | None = None  # greatest share of lines that were there before (Gopher: 0.3)
    max_repeated_line_text: float | None = None  # the same, by their characters (Gopher: 0.2)
    max_repeated_paragraphs: float | None = None  # greatest share of paragraphs that were there before (Gopher: 0.3)
    max_repeated_paragraph_text: float | None = None  # the same, by their characters (Gopher: 0.2)
    max_top_ngrams: tuple[float, ...] = ()  # greatest shares of the commonest 2, 3, 4 words (Gopher: 0.2 0.18 0.16)
    max_repeated_ngrams: tuple[float, ...] = ()  # of 5, ... words there before (Gopher: 0.15 0.14 0.13 0.12 0.11 0.1)


@dataclass(frozen=True)
class Cleaning(Filters):
    """Which documents are left out."""

    exact: bool = True  # leave out documents that are equal to an earlier one, of whatever source
    near: float | None = None  # leave out those that share this much with an earlier one, by MinHash (usual: 0.8)

    def __post_init__(self) -> None:
        if self.near is not None and not 0 < self.near <= 1:
            raise UserError(f"near is {self.near}: it is a share, above 0 and at most 1")

    @property
    def judges(self) -> bool:
        """Whether any document may be left out."""
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
