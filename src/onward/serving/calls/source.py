"""Parsers of answers that arrive in pieces.

A parser is a generator. It yields an Event for each new piece of the reply, and None where it needs more text of the
answer. Its result depends only on the whole text, not on the pieces in which the text arrives.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Kind = Literal["reasoning", "content", "call", "arguments", "end"]


@dataclass(frozen=True)
class Event:
    """New text of reasoning, content or a call's arguments (JSON), the name of a called tool, or the end of a call."""

    kind: Kind
    text: str = ""


Parser = Generator[Event | None, None, T]  # a parser that returns a T


class Source:
    """Text of an answer that is not read yet; `cut`: the answer ended at the limit of its length."""

    def __init__(self, text: str = "") -> None:
        self.text, self.ended, self.cut = text, False, False

    def take(self, length: int) -> str:
        taken, self.text = self.text[:length], self.text[length:]
        return taken

    def peek(self) -> Parser[str]:
        """The next character; "" at the end of the answer."""
        while not self.text and not self.ended:
            yield None
        return self.text[:1]

    def spaces(self) -> Parser[str]:
        """Take white space at the beginning."""
        taken = ""
        while True:
            taken += self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or self.ended:
                return taken
            yield None

    def begins(self, *markers: str) -> Parser[str]:
        """The marker with which the text begins, without taking it; "" if there is none."""
        while True:
            if found := next((marker for marker in markers if self.text.startswith(marker)), ""):
                return found
            if self.ended or not any(marker.startswith(self.text) for marker in markers):
                return ""
            yield None

    def skip(self, marker: str) -> Parser[bool]:
        """Take white space and the marker, if these begin the text; return whether the marker was there."""
        space = yield from self.spaces()
        found = yield from self.begins(marker)
        self.text = self.text[len(marker) :] if found else space + self.text
        return bool(found)

    def until(self, markers: Sequence[str], kind: Kind) -> Parser[str]:
        """Pass on the text before the first of the markers; take and return the marker, "" at the end."""
        while True:
            at, marker = first_of(self.text, markers)
            if not marker and not self.ended:
                at -= max((overlap(self.text, other) for other in markers), default=0)
            if text := self.take(at):
                yield Event(kind, text)
            if marker or self.ended:
                return self.take(len(marker))
            yield None

    def before(self, markers: Sequence[str]) -> Parser[tuple[str, str]]:
        """Take the text before the first of the markers, and the marker, "" at the end."""
        while True:
            at, marker = first_of(self.text, markers)
            if marker or self.ended:
                return self.take(at), self.take(len(marker))
            yield None


def first_of(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """(index, marker) of the first of the markers; without one, (length of the text, "")."""
    return min(((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=(len(text), ""))


def overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of the marker with which the text ends."""
    return next(n for n in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:n]))
