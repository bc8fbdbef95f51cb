"""Text that grows token by token."""

import codecs
from collections.abc import Sequence

from onward.text.tokenizer import BYTE, Tokenizer

LOOK_BACK = 8  # tokens of a prompt


class TextStream:
    """Incremental decoding: each token's text as soon as it is certain; joined, the pieces are the whole text.

    `before` are tokens that the text goes on from: some decoders drop a space where a text begins.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.said = list(before[-LOOK_BACK:])  # the tokens of the last piece, since a decoder may look back
        self.held: list[int] = []  # tokens since then, whose text is not certain
        self.bytes = codecs.getincrementaldecoder("utf-8")("replace")  # of a byte-level tokenizer nothing else is held

    def push(self, token: int) -> str:
        """The text that is certain now; an incomplete character is held back."""
        if token in self.tokenizer.special:
            return ""
        if self.tokenizer.of_bytes:
            return self.bytes.decode(self.tokenizer.token_bytes(token))
        self.held.append(token)
        name = self.tokenizer.inner.id_to_token(token) or ""
        if BYTE.fullmatch(name):  # a byte that follows can still spoil the whole run of them
            return ""
        text = self.text()
        incomplete = text.endswith("\ufffd") and token != self.tokenizer.unknown_id
        return "" if incomplete else self.say(text)

    def finish(self) -> str:
        """The text that is left."""
        return self.bytes.decode(b"", final=True) + self.say(self.text())

    def text(self) -> str:
        before = self.tokenizer.decode(self.said)
        return self.tokenizer.decode(self.said + self.held)[len(before) :]

    def say(self, text: str) -> str:
        if text:
            self.said, self.held = self.held, []
        return text
