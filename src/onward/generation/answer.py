"""The text of an answer as it grows, up to a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onward.text.stream import TextStream
from onward.text.tokenizer import Tokenizer


class StopText:
    """Passes text on up to the first of some stop texts, holding back what may be the beginning of one.

    The first is the one that is complete first, wherever the pieces are cut; of two that end together, the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.stopped = stops, "", False

    def push(self, piece: str) -> str:
        """The text that is certain now."""
        self.held += piece
        ends = [(start + len(stop), start) for stop in self.stops if (start := self.held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            certain = min(ends)[1]
        else:
            certain = len(self.held) - max((self.beginning(stop) for stop in self.stops), default=0)
        said, self.held = self.held[:certain], "" if self.stopped else self.held[certain:]
        return said

    def beginning(self, stop: str) -> int:
        """How many of the last characters are the beginning of a stop text."""
        return next(n for n in range(min(len(stop) - 1, len(self.held)), -1, -1) if self.held.endswith(stop[:n]))

    def finish(self) -> str:
        """The text that is left."""
        said, self.held = self.held, ""
        return said


class Answer:
    """Text from tokens: each piece as soon as it is certain; joined they are the whole text.

    `before` are the tokens that the answer goes on from; `stop` are texts that end it and are no part of it; `when` is
    asked with the whole text after each token whether to end there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int] = (),
        stop: Sequence[str] = (),
        when: Callable[[str], bool] | None = None,
    ) -> None:
        self.decoded, self.stops, self.when = TextStream(tokenizer, before), StopText(stop), when
        self.text = ""  # all that is certain
        self.told = 0  # how much of it has been taken

    def push(self, token: int) -> bool:
        """Go on by a token; whether the answer ends with it."""
        self.text += self.stops.push(self.decoded.push(token))
        return self.stops.stopped or bool(self.when and self.when(self.text))

    def finish(self) -> str:
        """There are no more tokens: the whole text."""
        if not self.stops.stopped:
            self.text += self.stops.push(self.decoded.finish())
        if not self.stops.stopped:
            self.text += self.stops.finish()
        return self.text

    def take(self) -> str:
        """The text that has become certain since the last time."""
        piece, self.told = self.text[self.told :], len(self.text)
        return piece
