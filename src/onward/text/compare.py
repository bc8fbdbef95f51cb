"""Comparison of tokenizers: bytes per token by language, script, source and kind of text, and texts that decoding does
not restore. Does not import torch."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from operator import itemgetter
from typing import Any

from onward.text.fast import encoder, samples
from onward.text.tokenizer import Tokenizer

Labeled = tuple[str, Mapping[str, str]]  # a text and its labels: {"source": "mybook.txt", "script": "Latin"}

SHARE = 0.2  # the fraction of lines of a kind, or of digits, above which a text is of that kind
LINES = {
    "markup": re.compile(r"</?[A-Za-z!][^<>]*>|\]\(\S+\)|^\s*#{1,6} \S|\\(?:begin|section|item)\b"),
    "code": re.compile(
        r"[;{}(\[]\s*$|^\s*(?:def|class|if|for|while|fn|func|function)\b.*[:{]\s*$|^\s*[\w.]+ [-+*/|]?= \S|"
        r"^\s*(?:import|from \S+ import|return|const|let|var|#include)\b"
    ),
    "dialogue": re.compile(r"^\s*(?:[\"“„«‹「『—–]|- |[A-Z][\w.' ]{0,30}:(?:\s|$))"),
}


def built_in() -> Iterator[Labeled]:
    """(text, labels) of the built-in short texts, with labels such as {"language": "German"} or {"kind": "code"}."""
    for by, texts in samples().items():
        for name, text in texts.items():
            yield text, {by: name}


def labeled(text: str, source: str) -> Labeled:
    return text, {"source": source, "script": script(text), "kind": kind(text)}


def script(text: str) -> str:
    """Most frequent script of the letters, such as Latin or Han; "none" without letters."""
    counts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if character.isalpha():
            counts[script_of(character)] += count
    return max(counts, key=counts.__getitem__, default="none")


@cache
def script_of(letter: str) -> str:
    first = unicodedata.name(letter, "unknown").split()[0]
    return "Han" if first == "CJK" else first.capitalize()


def kind(text: str) -> str:
    if sum(map(str.isdigit, text)) > SHARE * sum(not c.isspace() for c in text):
        return "numbers"
    lines = [line for line in text.split("\n") if line.strip()]
    for name, line in LINES.items():
        if sum(map(bool, map(line.search, lines))) > SHARE * len(lines):
            return name
    return "prose"


def compare(tokenizers: Mapping[str, Tokenizer], texts: Iterable[Labeled]) -> dict[str, Any]:
    """Compare tokenizers, given by name, on labeled texts, pairs (text, labels).

    The result has two lists of rows. `tokenizers`, for each tokenizer: its name, vocabulary size, bytes per token, the
    number of texts that decoding does not restore, and the first difference in such a text. `texts`, for all texts and
    for each label, such as the language German: the bytes of its texts and the bytes per token of each tokenizer.
    """
    encoders = {name: encoder(tokenizer) for name, tokenizer in tokenizers.items()}
    size: Counter[tuple[str, str]] = Counter()  # number of bytes, by label
    tokens: Counter[tuple[str, str, str]] = Counter()  # number of tokens, by tokenizer and label
    failures: Counter[str] = Counter()
    examples: dict[str, dict[str, str]] = {}
    for text, what in texts:
        labels = [("all", "all"), *what.items()]
        for label in labels:
            size[label] += len(text.encode())
        for name, tokenizer in tokenizers.items():
            ids = encoders[name]([text])[0].tolist()
            for label in labels:
                tokens[name, *label] += len(ids)
            if (back := tokenizer.decode(ids)) != text:
                failures[name] += 1
                examples.setdefault(name, difference(text, back))

    def density(name: str, by: str, text: str) -> float:
        return size[by, text] / max(tokens[name, by, text], 1)

    return {
        "tokenizers": [
            {
                "name": name,
                "vocabulary": tokenizer.vocab_size,
                "bytes_per_token": density(name, "all", "all"),
                "round_trip_failures": failures[name],
                "example": examples.get(name),
            }
            for name, tokenizer in tokenizers.items()
        ],
        "texts": [
            {
                "by": by,
                "text": text,
                "bytes": size[by, text],
                "bytes_per_token": {name: density(name, by, text) for name in tokenizers},
            }
            for by, text in sorted(size, key=itemgetter(0))
        ],
    }


def difference(text: str, back: str) -> dict[str, str]:
    """The first difference between a text and its decoded tokens, as an excerpt of each."""
    at = next((n for n, (a, b) in enumerate(zip(text, back)) if a != b), min(len(text), len(back)))
    place = slice(max(at - 10, 0), at + 20)
    return {"text": text[place], "back": back[place]}
