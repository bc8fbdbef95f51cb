"""Collect examples in tables; cut or leave out examples that are too long, and count them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from onward.base.errors import UserError
from onward.data.examples import Example, Examples, TokenSequence

TooLong = Literal["error", "cut", "drop"]


@dataclass
class TooLongCounts:
    """Counts of a source's examples: all, those that exceed the maximum length, and how these were handled."""

    examples: int = 0
    longer: int = 0
    cut: int = 0  # kept, without their last tokens
    lost: int = 0  # left out, because all tokens to train would be cut off
    equal: int = 0  # left out, because a pair's answers would be equal after cutting
    dropped: int = 0  # left out by --too-long drop

    def sentence(self, source: str, length: int) -> str:
        ways = {
            "cut to it": self.cut,
            "left out, because their answers would be cut off": self.lost,
            "left out, because both answers would be equal after cutting": self.equal,
            "left out": self.dropped,
        }
        listed = ", ".join(f"{count:,} {way}" for way, count in ways.items() if count)
        examples = f"{self.longer:,} of {self.examples:,} examples exceed the length of {length:,} tokens"
        return f"{source}: {examples}: {listed}" if listed else ""


@dataclass(frozen=True)
class LongExamples:
    count: int
    longest: int
    sources: Mapping[str, TooLongCounts]


def tabulated(examples: Iterable[Example], length: int, too_long: TooLong) -> tuple[Examples, LongExamples]:
    """Collect examples in a table; the model reads at most `length` tokens of each sequence.

    For a longer sequence, `too_long` "cut" keeps its first tokens, "drop" leaves out the example, and "error" raises a
    UserError. With "cut", an example is left out if all trained tokens of one of its sequences would be cut, or if a
    pair's sequences would become equal. A number, such as a margin, is 0 for an example without it."""
    tokens, trained, ends = list[np.ndarray](), list[np.ndarray](), [0]
    numbers: dict[str, list[float]] = {}
    columns: list[str] = []
    sources: dict[str, TooLongCounts] = {}
    per_example, longest, place = 0, 0, ""
    for example in examples:
        counts = sources.setdefault(example.source, TooLongCounts())
        counts.examples += 1
        most = max(len(sequence.tokens) - sequence.unread for sequence in example.sequences)
        if most > longest:
            longest, place = most, example.place
        rows = [cut(sequence, length) for sequence in example.sequences]
        learns = all(any(mask[1:]) for _, mask in rows)
        if most > length:
            counts.longer += 1
            equal = "label" not in example.numbers and len(rows) > 1 and rows[0][0] == rows[1][0]
            way = "dropped" if too_long == "drop" else "lost" if not learns else "equal" if equal else "cut"
            setattr(counts, way, getattr(counts, way) + 1)
            if way != "cut":
                continue
        if not learns:
            raise UserError(
                f"{example.place}: cannot train on it, because no trained token follows another token: make it longer"
            )
        per_example = len(rows)
        for ids, mask in rows:
            tokens.append(np.array(ids, np.uint32))
            trained.append(np.array(mask, bool))
            ends.append(ends[-1] + len(ids))
        columns.append(example.columns)
        before = (len(ends) - 1) // per_example - 1
        for name, value in example.numbers.items():
            column = numbers.setdefault(name, [])
            column += [0.0] * (before - len(column)) + [value]
    left = LongExamples(sum(one.longer for one in sources.values()), longest, sources)
    if left.count and too_long == "error":
        total = sum(one.examples for one in sources.values())
        raise UserError(
            f"{left.count:,} of {total:,} examples are longer than {length:,} tokens ({place} has {longest:,}): leave "
            "them out with --too-long drop, keep their first tokens with --too-long cut, or allow more with --length"
        )
    if not per_example:
        sentences = "; ".join(one.sentence(name, length) for name, one in sources.items())
        reason = f", because all are too long ({sentences})" if left.count else ""
        raise UserError(f"there is no example to train on{reason}")
    size = (len(ends) - 1) // per_example
    arrays = {name: np.array(values + [0.0] * (size - len(values))) for name, values in numbers.items()}
    flat = np.concatenate(tokens), np.concatenate(trained), np.array(ends[1:])
    return Examples(*flat, per_example, arrays, columns if any(columns) else ()), left


def cut(sequence: TokenSequence, length: int) -> tuple[Sequence[int], Sequence[bool]]:
    """Return the token ids, and whether each is trained, of the first `length` tokens that the model reads and all
    final tokens that only a reward uses."""
    read = len(sequence.tokens) - sequence.unread
    tokens, trained = ([*x[: min(read, length)], *x[read:]] for x in (sequence.tokens, sequence.trained))
    return tokens, trained  # type: ignore[return-value]


def held_out(count: int, share: float) -> np.ndarray:
    """Mark the fraction `share` of `count` examples for validation, evenly spread: (count,) bool."""
    steps = np.floor(np.arange(count + 1) * share)
    return steps[1:] > steps[:-1]
