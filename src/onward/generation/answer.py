"""The text of an answer while it grows token by token, and the stop texts that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onward.base.arguments import checked, explained
from onward.text.stream import TextStream
from onward.text.tokenizer import TokenId, Tokenizer


class StopText:
    """A filter for streamed text that stops at the first stop text, and delays characters that may begin a stop text.

    `stops` are the stop texts. The first stop text is the one that ends first, or the longer one of two that end at the
    same character; how the text is split into pieces has no effect. With `include`, the text ends after the stop text,
    else before it.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops, self.include, self.pending, self.stopped = stops, include, "", False

    def push(self, piece: str) -> str:
        """Add a piece of text, and return the part of the delayed and new text that can no longer become part of a stop
        text."""
        self.pending += piece
        ends = [(start + len(stop), start) for stop in self.stops if (start := self.pending.find(stop)) >= 0]
        if ends:
            self.stopped = True
            safe = min(ends)[0 if self.include else 1]
        else:
            safe = len(self.pending) - max((self.beginning(stop) for stop in self.stops), default=0)
        passed, self.pending = self.pending[:safe], "" if self.stopped else self.pending[safe:]
        return passed

    def beginning(self, stop: str) -> int:
        """Return the length of the longest proper prefix of `stop`, a stop text, with which the delayed text ends."""
        return next(n for n in range(min(len(stop) - 1, len(self.pending)), -1, -1) if self.pending.endswith(stop[:n]))

    def finish(self) -> str:
        """End the text, and return the delayed characters, which turned out not to be the beginning of a stop text."""
        rest, self.pending = self.pending, ""
        return rest


class Answer:
    """The text of an answer, decoded token by token: a character is added once no later token can change it.

    `before` are the tokens of the prompt, after which the answer is decoded. `limit` is the answer's maximum number of
    tokens, None for no limit. `stop` are texts that end the answer; the answer contains the stop text only with
    `include_stop`. `when` is called with the text so far after each token and returns whether the answer ends.
    """

    @checked
    def __init__(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int] = (),
        stop: Sequence[str] = (),
        when: Callable[[str], bool] | None = None,
        limit: int | None = None,
        include_stop: bool = False,
    ) -> None:
        self.stream, self.stop_text, self.when = TextStream(tokenizer, before), StopText(stop, include_stop), when
        self.text = ""  # the text that no further token can change
        self.remaining = limit  # number of tokens that may still be added; None: no limit
        self.num_taken = 0  # number of characters that `take` has returned

    @explained
    def push(self, token: TokenId) -> bool:
        """Append a token; return whether the answer ends with it, by a stop text, by `when`, or at the limit."""
        self.text += self.stop_text.push(self.stream.push(token))
        if self.remaining is not None:
            self.remaining -= 1
            if self.remaining == 0:  # the delayed text may complete a stop text
                self.finish()
        return self.stop_text.stopped or bool(self.when and self.when(self.text))

    def finish(self) -> str:
        """End the answer, and return its whole text, including characters that were delayed."""
        if not self.stop_text.stopped:
            self.text += self.stop_text.push(self.stream.finish())
        if not self.stop_text.stopped:
            self.text += self.stop_text.finish()
        return self.text

    def take(self) -> str:
        """Return the text that was added since the last call of `take`, for streaming."""
        piece, self.num_taken = self.text[self.num_taken :], len(self.text)
        return piece
