"""Incremental decoding: tokens to text, one token at a time."""

import codecs
from collections.abc import Sequence

from onward.text.tokenizer import BYTE, Tokenizer

LOOK_BACK = 8  # number of prompt tokens on which the text of the next token may depend


class TextStream:
    """Decodes tokens one at a time: the texts that `push` and `finish` return, joined, are the text of all tokens.

    `before` are the preceding tokens, such as the prompt: some decoders drop a space at the beginning of a text."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.decoded = list(before[-LOOK_BACK:])  # tokens of the text returned last, on which a decoder may depend
        self.pending: list[int] = []  # tokens after these, whose text can still change
        self.bytes = codecs.getincrementaldecoder("utf-8")("replace")  # the only state for byte-level tokenizers

    def push(self, token: int) -> str:
        """Add a token; return the new text that no further token can change, which never ends with an incomplete
        character."""
        if token in self.tokenizer.special:
            return ""
        if self.tokenizer.of_bytes:
            return self.bytes.decode(self.tokenizer.token_bytes(token))
        self.pending.append(token)
        name = self.tokenizer.inner.id_to_token(token) or ""
        if BYTE.fullmatch(name):  # a following byte can still make the whole run of bytes invalid
            return ""
        text = self.text()
        incomplete = text.endswith("\ufffd") and token != self.tokenizer.unknown_id
        return "" if incomplete else self.release(text)

    def finish(self) -> str:
        """The text that `push` has held back; it may end with an incomplete character."""
        return self.bytes.decode(b"", final=True) + self.release(self.text())

    def text(self) -> str:
        if not self.pending:
            return ""
        before = self.tokenizer.decode(self.decoded)
        return self.tokenizer.decode(self.decoded + self.pending)[len(before) :]

    def release(self, text: str) -> str:
        """Mark the pending tokens as returned, unless `text`, their decoded text, is empty."""
        if text:
            self.decoded, self.pending = self.pending, []
        return text
