"""The text of an answer as it grows, up to a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onward.text.stream import TextStream
from onward.text.tokenizer import Tokenizer


class StopText:
    """Passes text through up to the first stop text, and holds back what may be the beginning of one.

    The first is the stop text that is complete first, however the text is cut into pieces; of two that end at the same
    character, the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.pending, self.stopped = stops, "", False

    def push(self, piece: str) -> str:
        """Add a piece; returns the text that can no longer become part of a stop text."""
        self.pending += piece
        ends = [(start + len(stop), start) for stop in self.stops if (start := self.pending.find(stop)) >= 0]
        if ends:
            self.stopped = True
            safe = min(ends)[1]
        else:
            safe = len(self.pending) - max((self.beginning(stop) for stop in self.stops), default=0)
        passed, self.pending = self.pending[:safe], "" if self.stopped else self.pending[safe:]
        return passed

    def beginning(self, stop: str) -> int:
        """How many of the last characters begin a stop text."""
        return next(n for n in range(min(len(stop) - 1, len(self.pending)), -1, -1) if self.pending.endswith(stop[:n]))

    def finish(self) -> str:
        """The end of the text: returns what was held back."""
        rest, self.pending = self.pending, ""
        return rest


class Answer:
    """Text from tokens: each piece as soon as no further token can change it; joined they are the whole text.

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
        self.text = ""  # all text that no further token can change
        self.num_taken = 0  # characters that `take` has returned

    def push(self, token: int) -> bool:
        """Add a token; returns whether the answer ends with it."""
        self.text += self.stops.push(self.decoded.push(token))
        return self.stops.stopped or bool(self.when and self.when(self.text))

    def finish(self) -> str:
        """The end of the tokens: returns the whole text."""
        if not self.stops.stopped:
            self.text += self.stops.push(self.decoded.finish())
        if not self.stops.stopped:
            self.text += self.stops.finish()
        return self.text

    def take(self) -> str:
        """The text that was added since the last call."""
        piece, self.num_taken = self.text[self.num_taken :], len(self.text)
        return piece
