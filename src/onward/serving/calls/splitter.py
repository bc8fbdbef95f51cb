"""Splits a growing answer into reasoning, content and calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby

from onward.generation.schemas import Claim, Prepared
from onward.serving.calls.forms import Forms
from onward.serving.calls.markers import MarkedStream, unmarked
from onward.serving.calls.source import Event, Kind, Source
from onward.serving.jobs import Update


class Splitter:
    """Splits marked text into events whose texts, joined, do not depend on the pieces in which it arrives. White space
    around reasoning and calls is left out, and so are calls after the first if the request takes only one."""

    def __init__(self, forms: Forms) -> None:
        self.forms, self.source = forms, Source()
        self.parser = forms.reader(self.source)
        self.kind: Kind | None = None  # kind of the last event
        self.held, self.begun = "", False  # white space held until text follows; whether reasoning was passed on
        self.num_calls, self.reasons = 0, False  # `reasons`: whether the text is inside reasoning
        self.holds = False  # whether the last piece of text was held back, since it may begin a call

    def push(self, text: str) -> list[Event]:
        self.source.text += text
        self.holds, result = True, list[Event]()
        for event in self.parser:
            if event is None:
                break
            self.holds, self.reasons = False, event.kind == "reasoning"
            as_written = event.kind == "reasoning" and self.forms.reasoning == "none"
            text = self.forms.markers.spelled(event.text) if event.kind == "arguments" else unmarked(event.text)
            result += self.trimmed("content" if as_written else event.kind, text)
        return result

    def finish(self, cut: bool = False) -> list[Event]:
        self.source.ended, self.source.cut = True, cut
        result = self.push("")
        return result if self.kind or not self.held else [Event("content", self.held)]  # nothing but white space

    def trimmed(self, kind: Kind, text: str) -> list[Event]:
        """An event without white space at the borders of reasoning and calls, or none."""
        if kind == "reasoning":
            if self.kind != kind:
                self.kind, self.held, self.begun = kind, "", False
            text = self.held + text if self.begun else text.lstrip()
            kept = text.rstrip()
            self.held, self.begun, text = text[len(kept) :], self.begun or bool(kept), kept
        elif kind == "content":
            if self.kind != kind:
                text = self.held + text if self.kind is None else text.lstrip()
                if not text.strip():  # a call may follow
                    self.held = text
                    return []
                self.kind, self.held = kind, ""
        else:
            self.kind, self.held = kind, ""
            self.num_calls += kind == "call"
            if self.num_calls > 1 and not self.forms.parallel:
                return []
        return [Event(kind, text)] if text or kind == "end" else []


class AnswerSplitter:
    """Splits an answer into events by its updates. The tokens are decoded once more, to text that marks control tokens,
    and read only as far as the text of the updates, which may be delayed and ends before a stop text."""

    def __init__(self, forms: Forms, prompt: Sequence[int]) -> None:
        self.splitter, self.stream = Splitter(forms), MarkedStream(forms.markers, prompt)
        self.pending = deque[str]()  # marked text that is not read yet
        self.room = 0  # number of characters that may be read
        self.num_reasoning = 0

    @property
    def apart(self) -> bool:
        """Whether the last token is part of reasoning or of a call, and not of text that is held back."""
        held = self.splitter.holds and not self.splitter.reasons and self.splitter.kind == "reasoning"
        return self.splitter.kind not in (None, "content") and not held

    def push(self, update: Update) -> list[Event]:
        """The new events, joined so that neighbors differ in kind."""
        self.pending += map(self.stream.push, update.tokens)
        self.room += len(update.text)
        events = list[Event]()
        while self.pending:
            piece = self.pending.popleft()
            size = len(unmarked(piece))
            if size > self.room:
                self.pending.appendleft(piece[self.room :])
                piece = piece[: self.room]
            self.room -= min(size, self.room)
            events += self.splitter.push(piece)
            if size > len(piece):
                break
            self.num_reasoning += self.splitter.reasons
        if update.finish_reason:
            events += self.splitter.push(self.stream.finish()[: self.room])
            events += self.splitter.finish(update.finish_reason == "length")
        return joined(events)


class AnswerCheck:
    """The claims to check for a complete answer: keywords of its schemas that the constraint does not enforce.
    `schema` is that of the content, None for any text."""

    def __init__(self, forms: Forms, prompt: Sequence[int], schema: Prepared | None) -> None:
        self.forms, self.prompt, self.schema = forms, prompt, schema
        self.arguments = {function.name: function.arguments for function in forms.functions}

    @property
    def notes(self) -> list[str]:
        """Sentences about the keywords that are checked."""
        schemas = [*self.arguments.values(), *([self.schema] if self.schema else [])]
        return [schema.note for schema in schemas if schema.note]

    def claims(self, tokens: Sequence[int]) -> list[Claim]:
        splitter, stream = Splitter(self.forms), MarkedStream(self.forms.markers, self.prompt)
        events = splitter.push("".join(map(stream.push, tokens)) + stream.finish()) + splitter.finish()
        schema: Prepared | None = None
        claims = list[Claim]()
        for event in joined(events):
            schema = self.arguments[event.text] if event.kind == "call" else schema
            checked = schema if event.kind == "arguments" else self.schema if event.kind == "content" else None
            claims += checked.claims(event.text) if checked else []
        return claims


def joined(events: Sequence[Event]) -> list[Event]:
    groups = ((kind, [event.text for event in group]) for kind, group in groupby(events, lambda event: event.kind))
    return [Event(kind, "".join(texts)) for kind, texts in groups]
