"""Strings that know where each of their characters comes from: the template, a message's field, or another value. Does
not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

MAX_LENGTH = 10_000_000  # characters of a text that a template makes
ITEM = 20  # characters that an item of a list counts as
MAX_WIDTH = 9_999  # characters to which a template pads a field
OTHER, TEMPLATE, FIELDS = 0, 1, 2  # sources of characters: a value or an operation, the template, fields of messages
GENERATED = 1  # bit of a mask's code: the character is in a block that the template marks as generated
DIRECTIVE = re.compile(r"%(?:\((?P<name>.*?)\))?[-#0 +]*(?P<width>\*|\d*)(?:\.(?P<digits>\*|\d*))?[hlL]?.", re.DOTALL)


class TooLarge(ValueError):
    """Raised if a chat template makes a text or list of more than 10,000,000 characters, or pads a field to more than
    9,999."""

    def __init__(self) -> None:
        super().__init__("it makes texts or lists that are too large")


class MaskedString(str):
    """A string with a mask: for each character its source, which is the chat template (TEMPLATE), a field of a message
    (FIELDS and above), or anything else (OTHER), and whether the template marks it as generated.

    The mask is a string of the same length, whose characters have the code `2 * source + generated`. Operations that
    select or join characters keep their mask. The result of any other operation has the source OTHER.
    """

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
        """Return `parts`, plain strings that are consecutive parts of this string, as masked parts of it. `separator`
        is the text between the parts; None means white space."""
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
        """Return the parts between which `replace("", new, times)` inserts `new`: before each of the first characters
        and at the end, `times` places in all."""
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
        """Return `text`, this string in upper or lower case, with the mask of this string; without a mask if the
        lengths differ."""
        return MaskedString(text, self._mask) if len(text) == len(self) else MaskedString(text)


def sourced(text: str, source: int) -> MaskedString:
    """Return a text whose characters all have this source."""
    return MaskedString(text, chr(2 * source) * len(text))


def generated(text: str) -> MaskedString:
    """Return a text whose characters are all marked as generated; their sources are kept."""
    return MaskedString(text, "".join(chr(ord(code) | GENERATED) for code in mask_of(text)))


def mask_of(text: str) -> str:
    """Return the mask of a string, one code per character (see MaskedString); zeros for a plain string."""
    return text._mask if isinstance(text, MaskedString) else "\0" * len(text)


def codes_of(source: int) -> str:
    """Return the codes that characters of this source have in a mask."""
    return chr(2 * source) + chr(2 * source + GENERATED)


def concat(parts: Iterable[Any]) -> str:
    """Convert values to text and join them; values with a mask keep it. Raises TooLarge if the result is too long."""
    texts = [as_text(part) for part in parts]
    check_length(sum(map(len, texts)))
    return MaskedString("".join(texts), "".join(map(mask_of, texts)))


def as_text(value: Any) -> str:
    """Convert a value to text as a chat template prints it. Raises TooLarge if its lists and dicts are too large to
    print."""
    if not isinstance(value, str | int | float | None):
        check_size(value)
    return str(value)


def check_length(length: int) -> None:
    """Raise TooLarge if `length`, the number of characters of a text, exceeds 10,000,000."""
    if length > MAX_LENGTH:
        raise TooLarge


def check_size(value: Any) -> None:
    """Raise TooLarge if the texts and items within a value, nested lists and dicts included, would be too long as text.
    A list that occurs several times counts each time."""
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
    """Return `text % values`, in which the characters of `text`, and of values inserted by a plain `%s`, keep their
    masks. Raises TooLarge if a value is too large to print or a field too wide."""
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
