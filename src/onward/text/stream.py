"""Incremental decoding: tokens to text, one token at a time."""

import codecs
from collections.abc import Sequence

from onward.text.tokenizer import BYTE, Tokenizer

LOOK_BACK = 8  # tokens of a prompt on which the text of the next token may depend


class TextStream:
    """Decodes a sequence of tokens in pieces; joined, the pieces are the text of the whole sequence.

    `before` are the tokens that the text follows: some decoders drop a space at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.decoded = list(before[-LOOK_BACK:])  # tokens of the last piece: a decoder may depend on them
        self.held: list[int] = []  # tokens after it, whose text can still change
        self.bytes = codecs.getincrementaldecoder("utf-8")("replace")  # all that a byte-level tokenizer needs

    def push(self, token: int) -> str:
        """Add a token; return the text that no further token can change. An incomplete character is held back."""
        if token in self.tokenizer.special:
            return ""
        if self.tokenizer.of_bytes:
            return self.bytes.decode(self.tokenizer.token_bytes(token))
        self.held.append(token)
        name = self.tokenizer.inner.id_to_token(token) or ""
        if BYTE.fullmatch(name):  # a following byte can still make the whole run of bytes invalid
            return ""
        text = self.text()
        incomplete = text.endswith("\ufffd") and token != self.tokenizer.unknown_id
        return "" if incomplete else self.release(text)

    def finish(self) -> str:
        """The remaining text, after the last token."""
        return self.bytes.decode(b"", final=True) + self.release(self.text())

    def text(self) -> str:
        """The text of the held tokens."""
        before = self.tokenizer.decode(self.decoded)
        return self.tokenizer.decode(self.decoded + self.held)[len(before) :]

    def release(self, text: str) -> str:
        """The text of the held tokens, which are now decoded."""
        if text:
            self.decoded, self.held = self.held, []
        return text
