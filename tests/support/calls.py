"""Answers with reasoning and calls: their tokenizers, texts, tokens and events."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

from onward import Tokenizer, train_tokenizer
from onward.serving.calls.forms import Forms
from onward.serving.calls.markers import MARKERS, Markers
from onward.serving.calls.source import Event
from onward.serving.calls.splitter import Splitter, joined
from onward.serving.tools import Tools

ANY_MARKER = re.compile("|".join(f"({re.escape(marker)})" for marker in MARKERS))


FRAGMENTS = (  # of answers, of calls that are written wrongly, and of values that look like calls
    *(*MARKERS, "<function=weather>", "<function=", "</function>", "<parameter=city>", "<parameter=", "</parameter>"),
    *("{", "}", "[", "]", ",", ";", '"', "\\", ":", '"name"', " ", "\n", "\n\n", "Hm", "ü 😀", "final", "analysis"),
    *("weather", "assistant", "to=functions.x", "commentary to=functions.weather ", '{"name": "weather"}'),
    *('{"name": "x", "arguments": {}}', '{"name": "time", "arguments": null}', '{"name": "ti", "args": [1]}'),
    *('{"name": "time", "arguments": "{}"}', '{"name": "weather", "parameters": {"city": "O\\u00e9 }\\""}}'),
)


def random_text(choose: random.Random) -> str:
    """Fragments of answers in any order, among them words such as w3w, each of which occurs once."""
    count = choose.randrange(1, 14)
    return "".join(f"w{n}w" if choose.random() < 0.2 else choose.choice(FRAGMENTS) for n in range(count))


def tokenizer_of(spec: str, texts: Sequence[str] = (), controls: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer trained on `texts` by the specification `spec`, with these control tokens."""
    inner = train_tokenizer(spec, texts).inner
    inner.add_special_tokens([*controls])
    return Tokenizer(inner)


PLAIN, CONTROL = Markers(tokenizer_of("byte")), Markers(tokenizer_of("byte", controls=MARKERS))


def written(text: str, markers: Markers) -> str:
    """A text as a model writes it, with control tokens for the markers that have one."""
    return ANY_MARKER.sub(lambda found: markers.text(found[0]), text)


def encoded(text: str, markers: Markers) -> list[int]:
    """The tokens of a text, with control tokens for the markers that have one."""
    parts = filter(None, ANY_MARKER.split(text))
    return [
        i for part in parts for i in ([markers.ids[part]] if part in markers.ids else markers.tokenizer.encode(part))
    ]


def forms_for(
    tools: Sequence[Any], calls: str, reasoning: str = "none", markers: Markers = PLAIN, **more: Any
) -> Forms:
    """The parser settings for answers with these tools and formats."""
    return Forms(calls, reasoning, markers, Tools.of(tools, None, None).callable, **more)


def read(forms: Forms, pieces: Iterable[str], cut: bool = False) -> list[tuple[str, str]]:
    """The events of an answer that arrives in these pieces, as pairs (kind, text)."""
    splitter = Splitter(forms)
    events: list[Event] = [event for piece in pieces for event in splitter.push(piece)]
    return [(event.kind, event.text) for event in joined([*events, *splitter.finish(cut)])]
