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
    """A piece of a reply: new text of the reasoning, of the content or of a call's arguments (JSON); the name of a tool
    that is called, in a "call"; or the end of a call whose arguments are complete."""

    kind: Kind
    text: str = ""


Parser = Generator[Event | None, None, T]  # a parser that returns a T


class Source:
    """The text of an answer that a parser has not read yet. `ended` is set after the last piece, `cut` if the answer
    then ends at the limit of its length."""

    def __init__(self, text: str = "") -> None:
        self.text, self.ended, self.cut = text, False, False

    def take(self, length: int) -> str:
        """Remove and return the first characters of the text."""
        taken, self.text = self.text[:length], self.text[length:]
        return taken

    def peek(self) -> Parser[str]:
        """Return the next character; "" at the end of the answer."""
        while not self.text and not self.ended:
            yield None
        return self.text[:1]

    def spaces(self) -> Parser[str]:
        """Remove and return white space at the beginning of the text."""
        taken = ""
        while True:
            taken += self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or self.ended:
                return taken
            yield None

    def begins(self, *markers: str) -> Parser[str]:
        """Return the marker with which the text begins; "" if there is none. The marker is not removed."""
        while True:
            if found := next((marker for marker in markers if self.text.startswith(marker)), ""):
                return found
            if self.ended or not any(marker.startswith(self.text) for marker in markers):
                return ""
            yield None

    def skip(self, marker: str) -> Parser[bool]:
        """Remove white space and the marker, if these begin the text; return whether the marker was there."""
        space = yield from self.spaces()
        found = yield from self.begins(marker)
        self.text = self.text[len(marker) :] if found else space + self.text
        return bool(found)

    def until(self, markers: Sequence[str], kind: Kind) -> Parser[str]:
        """Pass on the text before the first of the markers as events of this kind; remove and return the marker, ""
        if the answer ends without one."""
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
        """Remove the text before the first of the markers, and the marker; return both. The marker is "" if the answer
        ends without one."""
        while True:
            at, marker = first_of(self.text, markers)
            if marker or self.ended:
                return self.take(at), self.take(len(marker))
            yield None


def first_of(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Return the first of the markers in a text, as (index, marker); without one, (length of the text, "")."""
    return min(((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=(len(text), ""))


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest proper prefix of the marker with which the text ends."""
    return next(n for n in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:n]))
