"""Answers with reasoning and calls, as text, and what is read from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from onward.serving.calls.forms import Forms
from onward.serving.calls.markers import MARKERS, Markers
from onward.serving.calls.source import Event
from onward.serving.calls.splitter import Splitter
from onward.serving.tools import Tools
from onward.text.tokenizer import Tokenizer


def byte_tokenizer(controls: Iterable[str] = ()) -> Tokenizer:
    """A tokenizer of single bytes with these control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>", *controls])
    return Tokenizer(inner)


PLAIN, CONTROL = Markers(byte_tokenizer()), Markers(byte_tokenizer(MARKERS))


def marked(text: str, markers: Markers) -> str:
    """A text in which the markers that are control tokens stand as such."""
    for marker in MARKERS:
        text = text.replace(marker, markers.text(marker))
    return text


def forms_for(tools: Sequence[Any], calls: str, reasoning: str = "none", markers: Markers = PLAIN, **more: Any) -> Forms:
    """How answers with these tools, in these forms, are read."""
    return Forms(calls, reasoning, markers, Tools.of(tools, None, None).callable, **more)


def read(forms: Forms, pieces: Iterable[str], cut: bool = False) -> list[tuple[str, str]]:
    """The events of an answer that arrives in these pieces, joined by their kind."""
    splitter = Splitter(forms)
    events = [event for piece in pieces for event in splitter.push(marked(piece, forms.markers))]
    return told([*events, *splitter.finish(cut)])


def told(events: Iterable[Event]) -> list[tuple[str, str]]:
    """Events as pairs (kind, text), those of a kind that follow each other joined, without the ends of calls."""
    result: list[tuple[str, str]] = []
    for event in events:
        if result and result[-1][0] == event.kind and event.kind not in ("call", "end"):
            result[-1] = (event.kind, result[-1][1] + event.text)
        else:
            result.append((event.kind, event.text))
    return result
