"""Strings that record where each of their characters comes from: the template, a message's field, or another value.
Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

MAX_LENGTH = 10_000_000  # largest number of characters of a text that a template makes
ITEM = 20  # characters that an item of a list counts as
MAX_WIDTH = 9_999  # largest width to which a template may pad a field
OTHER, TEMPLATE, FIELDS = 0, 1, 2  # sources of characters: a value or an operation, the template, fields of messages
GENERATED = 1  # bit of a mask's code: the character is in a block that the template marks as generated
DIRECTIVE = re.compile(r"%(?:\((?P<name>.*?)\))?[-#0 +]*(?P<width>\*|\d*)(?:\.(?P<digits>\*|\d*))?[hlL]?.", re.DOTALL)


class TooLarge(ValueError):
    """Raised if a chat template makes a text or list that is too long, or pads a field too widely."""

    def __init__(self) -> None:
        super().__init__("it makes texts or lists that are too large")


class MaskedString(str):
    """A string with a mask: for each character its source, which is the chat template (TEMPLATE), a field of a message
    (FIELDS and above), or anything else (OTHER), and whether the template marks it as generated.

    The mask is a string of the same length, whose characters have the code `2 * source + generated`. Operations that
    select or join characters, or change their case but not their number, keep their mask. The result of any other
    operation has the source OTHER.
    """

    # An operation that loses the mask is safe: text without a mask never becomes a control token.
    _mask: str  # templates cannot read private attributes

    def __new__(cls, text: str, mask: str | None = None) -> MaskedString:
        self = super().__new__(cls, text)
        self._mask = "\0" * len(text) if mask is None else mask
        return self

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> MaskedString:
        if not isinstance(key, slice):
            index = range(len(self))[key]
            key = slice(index, index + 1)
        return MaskedString(super().__getitem__(key), self._mask[key])

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return (self[i] for i in range(len(self)))

    def __add__(self, other: str) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> MaskedString:
        check_length(len(self) * max(0, int(count)))
        return MaskedString(super().__mul__(count), self._mask * int(count))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return percent(self, values)

    def join(self, parts: Iterable[str], /) -> str:
        separated = list[str]()
        for number, part in enumerate(parts):
            if not isinstance(part, str):
                raise TypeError(f"sequence item {number}: expected str instance, {type(part).__name__} found")
            separated += (self, part)
        return concat(separated[1:])

    def lstrip(self, chars: str | None = None, /) -> MaskedString:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> MaskedString:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> MaskedString:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> MaskedString:
        return self[len(prefix) :] if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> MaskedString:
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self.located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self.located(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:  # type: ignore[override]
        lines = self.located(super().splitlines(True), "")
        return lines if keepends else [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str, /) -> tuple[str, str, str]:  # type: ignore[override]
        before, separator, after = self.located(super().partition(sep), "")
        return before, separator, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:  # type: ignore[override]
        before, separator, after = self.located(super().rpartition(sep), "")
        return before, separator, after

    def located(self, parts: Iterable[str], separator: str | None) -> list[str]:
        """Consecutive parts of this string, with their masks; `separator` is between them (None: white space)."""
        result: list[str] = []
        position = 0
        for part in parts:
            start = self.find(part, position) if separator is None else position
            result.append(self[start : start + len(part)])
            position = start + len(part) + len(separator or "")
        return result

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:  # type: ignore[override]
        text = str.__getitem__(self, slice(None))
        times = text.count(old) if (count := int(count)) < 0 else min(count, text.count(old))
        check_length(len(self) + times * len(new))
        parts = self.located(text.split(old, count), old) if old else self.spread(times)
        return MaskedString(new, mask_of(new)).join(parts)

    def spread(self, times: int) -> list[str]:
        """The parts between which `replace("", new, times)` inserts `new`."""
        return ["", *self[: times - 1], self[times - 1 :]] if times else [self]

    def lower(self) -> str:
        return self.cased(super().lower())

    def upper(self) -> str:
        return self.cased(super().upper())

    def capitalize(self) -> str:
        return self.cased(super().capitalize())

    def title(self) -> str:
        return self.cased(super().title())

    def cased(self, text: str) -> str:
        """`text` with the mask of this string; without a mask if the lengths differ."""
        return MaskedString(text, self._mask) if len(text) == len(self) else MaskedString(text)


def sourced(text: str, source: int) -> MaskedString:
    return MaskedString(text, chr(2 * source) * len(text))


def generated(text: str) -> MaskedString:
    return MaskedString(text, "".join(chr(ord(code) | GENERATED) for code in mask_of(text)))


def mask_of(text: str) -> str:
    """The mask, one code per character; zeros for a plain string."""
    return text._mask if isinstance(text, MaskedString) else "\0" * len(text)


def codes_of(source: int) -> str:
    return chr(2 * source) + chr(2 * source + GENERATED)


def concat(parts: Iterable[Any]) -> str:
    texts = [as_text(part) for part in parts]
    check_length(sum(map(len, texts)))
    return MaskedString("".join(texts), "".join(map(mask_of, texts)))


def as_text(value: Any) -> str:
    if not isinstance(value, str | int | float | None):
        check_size(value)
    return str(value)


def check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise TooLarge


def check_size(value: Any) -> None:
    """Refuse a value that would be too long as text; a list that occurs several times counts each time."""
    waiting, total = [value], 0
    while waiting:
        one = waiting.pop()
        total += len(one) if isinstance(one, str) else ITEM
        if isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            waiting += one
        check_length(total + ITEM * len(waiting))


def percent(text: MaskedString, values: Any) -> str:
    """`text % values`, in which `text` and values inserted by a plain `%s` keep their masks."""
    pieces, position = list[str](), 0
    waiting = list(values) if isinstance(values, tuple) else [values]
    for match in DIRECTIVE.finditer(text):
        pieces.append(text[position : match.start()])
        position, directive, name = match.end(), str.__getitem__(text, slice(*match.span())), match["name"]
        if any(number == "*" or (number and int(number) > MAX_WIDTH) for number in match.group("width", "digits")):
            raise TooLarge
        if directive == "%%":
            pieces.append(text[position - 1 : position])
            continue
        if name is None and not waiting:
            raise TypeError("not enough arguments for format string")
        value = waiting.pop(0) if name is None else values[name]
        plain = directive.replace(f"({name})", "", 1)
        pieces.append(as_text(value) if plain == "%s" else plain % (value,))
    if waiting and not isinstance(values, Mapping):
        raise TypeError("not all arguments converted during string formatting")
    return concat([*pieces, text[position:]])
