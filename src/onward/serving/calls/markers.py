"""The markers of calls and reasoning, as control tokens or as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from onward.generation.constraint import terminal
from onward.text.stream import TextStream
from onward.text.tokenizer import SURROGATE, Tokenizer

MARKERS = (  # that some models have as control tokens
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"),
    *("<think>", "</think>", "[THINK]", "[/THINK]"),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)


class Markers:
    """The markers of MARKERS in the answers of a model with this tokenizer.

    A marker that is a control token is not part of the text of an answer. In marked text it stands as a character of
    its own, half a surrogate pair, which no text of a model contains: the same marker spelled by ordinary tokens is
    plain text. A marker that is no control token is the text itself.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        found = {marker: tokenizer.inner.token_to_id(marker) for marker in MARKERS}
        self.tokenizer = tokenizer
        self.ids = {marker: i for marker, i in found.items() if i in tokenizer.special}
        self.marks = {i: chr(0xD800 + number) for number, i in enumerate(self.ids.values())}

    def text(self, marker: str) -> str:
        """Return the marker as it stands in marked text."""
        return self.marks[self.ids[marker]] if marker in self.ids else marker

    def spelled(self, text: str) -> str:
        """Return marked text with the markers in it as text, as in an argument in which a model quotes them."""
        names = {self.marks[i]: marker for marker, i in self.ids.items()}
        return SURROGATE.sub(lambda mark: names[mark[0]], text)

    def symbol(self, marker: str) -> str:
        """Return the marker as a symbol of a grammar."""
        return terminal(self.tokenizer, marker)

    def up_to(self, marker: str, name: str) -> tuple[str, str]:
        """Return (symbols, rules) of a grammar for any text that ends with the marker, and the marker. `name` is that
        of the rule."""
        if marker in self.ids:
            return f"/(?s:.*)/ {self.symbol(marker)}", ""
        expression = re.escape(marker).replace("/", r"\/")
        return name, f"{name}[lazy]: /(?s:.*){expression}/\n"

    def marked(self, tokens: Sequence[int]) -> str:
        """Return the marked text of tokens, such as the last ones of a prompt."""
        stream = MarkedStream(self, ())
        return "".join(map(stream.push, tokens)) + stream.finish()


class MarkedStream(TextStream):
    """Decodes tokens one by one to marked text."""

    def __init__(self, markers: Markers, before: Sequence[int]) -> None:
        super().__init__(markers.tokenizer, before)
        self.marks = markers.marks

    def push(self, token: int) -> str:
        """Add a token; return the new text that no further token can change."""
        return self.marks.get(token) or super().push(token)


def unmarked(text: str) -> str:
    """Return marked text without its control tokens."""
    return SURROGATE.sub("", text)
