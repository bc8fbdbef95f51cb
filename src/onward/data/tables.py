"""Examples are collected in tables; those that are too long are cut or left out, and counted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from onward.data.examples import Example, Examples, TokenSequence
from onward.errors import UserError

TooLong = Literal["error", "cut", "drop"]


@dataclass(frozen=True)
class Left:
    """The number of examples that were longer than allowed and so were cut or dropped, and the length of the longest
    example, in tokens."""

    count: int = 0
    longest: int = 0


def tabulated(examples: Iterable[Example], length: int, too_long: TooLong) -> tuple[Examples, Left]:
    """Collect examples in a table, in which no sequence has more than `length` tokens that the model reads. Returns the
    table, and the number of longer examples.

    For a longer sequence, `too_long` "cut" keeps its first tokens, "drop" leaves out the example, and "error" raises a
    UserError. An example whose trained tokens are all cut is left out too; an example without trained tokens is a
    UserError. Numbers, such as a margin, that some examples lack are 0 there.
    """
    tokens, trained, ends = list[np.ndarray](), list[np.ndarray](), [0]
    numbers: dict[str, list[float]] = {}
    columns: list[str] = []
    per_example, count, longest, total = 0, 0, 0, 0
    place = ""
    for example in examples:
        total += 1
        most = max(len(sequence.tokens) - sequence.unread for sequence in example.sequences)
        if most > longest:
            longest, place = most, example.place
        rows = [cut(sequence, length) for sequence in example.sequences]
        learns = all(any(mask[1:]) for _, mask in rows)
        count += most > length
        if most > length and (too_long == "drop" or not learns):
            continue
        if not learns:
            raise UserError(f"{example.place}: it has no token that is trained after another one: make it longer")
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
    if count and too_long == "error":
        raise UserError(
            f"{count:,} of {total:,} examples are longer than {length:,} tokens, {place} with {longest:,} the longest: "
            "--too-long drop leaves them out, --too-long cut keeps their first tokens, and --length allows more"
        )
    if not per_example:
        raise UserError("there is no example to train on" + (", as all are too long" if count else ""))
    size = (len(ends) - 1) // per_example
    arrays = {name: np.array(values + [0.0] * (size - len(values))) for name, values in numbers.items()}
    flat = np.concatenate(tokens), np.concatenate(trained), np.array(ends[1:])
    return Examples(*flat, per_example, arrays, columns if any(columns) else ()), Left(count, longest)


def cut(sequence: TokenSequence, length: int) -> tuple[Sequence[int], Sequence[bool]]:
    """Shorten a sequence to its first `length` tokens that the model reads, followed by all of its final tokens that
    only a reward uses. Returns (token ids, whether each is trained)."""
    read = len(sequence.tokens) - sequence.unread
    tokens, trained = ([*x[: min(read, length)], *x[read:]] for x in (sequence.tokens, sequence.trained))
    return tokens, trained  # type: ignore[return-value]


def held_out(count: int, share: float) -> np.ndarray:
    """Select the fraction `share` of `count` examples for validation, evenly spread: (count,) bool, True for the
    selected."""
    steps = np.floor(np.arange(count + 1) * share)
    return steps[1:] > steps[:-1]
