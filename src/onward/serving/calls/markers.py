"""The markers of calls and reasoning, as control tokens or as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from onward.generation.constraint import terminal
from onward.text.stream import TextStream
from onward.text.tokenizer import SURROGATE, Tokenizer

MARKERS = (  # some models have these as control tokens
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"),
    *("<think>", "</think>", "[THINK]", "[/THINK]"),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)


class Markers:
    """The markers in the answers of a model with this tokenizer. In marked text, an unpaired surrogate, which no text
    of a model contains, represents a marker that is a control token; the same marker spelled by ordinary tokens is
    plain text. Any other marker is the text itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        found = {marker: tokenizer.inner.token_to_id(marker) for marker in MARKERS}
        self.tokenizer = tokenizer
        self.ids = {marker: i for marker, i in found.items() if i in tokenizer.special}
        self.marks = {i: chr(0xD800 + number) for number, i in enumerate(self.ids.values())}

    def text(self, marker: str) -> str:
        return self.marks[self.ids[marker]] if marker in self.ids else marker

    def spelled(self, text: str) -> str:
        """Replace the markers in marked text by their texts, for example in an argument that quotes markers."""
        names = {self.marks[i]: marker for marker, i in self.ids.items()}
        return SURROGATE.sub(lambda mark: names[mark[0]], text)

    def symbol(self, marker: str) -> str:
        return terminal(self.tokenizer, marker)

    def up_to(self, marker: str, name: str) -> tuple[str, str]:
        """(symbols, rules) of any text up to and including the marker; `name` is the name of the rule, if there is
        one."""
        if marker in self.ids:
            return f"/(?s:.*)/ {self.symbol(marker)}", ""
        expression = re.escape(marker).replace("/", r"\/")
        return name, f"{name}[lazy]: /(?s:.*){expression}/\n"

    def marked(self, tokens: Sequence[int]) -> str:
        """Decode tokens to marked text."""
        stream = MarkedStream(self, ())
        return "".join(map(stream.push, tokens)) + stream.finish()


class MarkedStream(TextStream):
    def __init__(self, markers: Markers, before: Sequence[int]) -> None:
        super().__init__(markers.tokenizer, before)
        self.marks = markers.marks

    def push(self, token: int) -> str:
        if not (mark := self.marks.get(token)):
            return super().push(token)
        text = self.text()  # of bytes, which belongs before the mark
        return ("" if text.endswith("\ufffd") else self.release(text)) + mark


def unmarked(text: str) -> str:
    return SURROGATE.sub("", text)
