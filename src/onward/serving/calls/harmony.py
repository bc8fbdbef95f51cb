"""Answers in the harmony format of gpt-oss: messages on channels, some of them calls."""

from __future__ import annotations

import re
from collections.abc import Sequence

from onward.serving.calls.json_calls import arguments_of, incomplete, quoted
from onward.serving.calls.markers import Markers, unmarked
from onward.serving.calls.schemas import Function, arguments_rule
from onward.serving.calls.source import Event, Parser, Source

PREFIX = "functions."  # prefix of a recipient that is a function


def read_harmony(source: Source, functions: Sequence[Function], markers: Markers) -> Parser[None]:
    """Read messages `<|channel|>CHANNEL<|message|>text<|end|><|start|>assistant...`: the channel analysis is reasoning;
    a message to one of `functions`, as in `<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>`, is a call; all others are content."""
    start, channel, body = (markers.text(one) for one in ("<|start|>", "<|channel|>", "<|message|>"))
    ends = [markers.text(one) for one in ("<|end|>", "<|call|>", "<|return|>")]
    constrain, names = markers.text("<|constrain|>"), [function.name for function in functions]
    space = yield from source.spaces()
    if not (yield from source.begins(channel, start, "to=")):
        source.text = space + source.text
        if (yield from source.until([channel, start, *ends], "content")) == channel:
            source.text = channel + source.text
    while True:
        header, found = yield from source.before([body])
        if not found:
            plain = unmarked(header.replace(start, "").replace(channel, ""))
            if plain.strip():
                yield from incomplete(source, plain)
            return
        header = header.replace(constrain, " ")
        to = re.search(rf"to=((?:(?!{re.escape(channel)})\S)+)", header)
        name = to[1].removeprefix(PREFIX) if to and to[1].startswith(PREFIX) else ""
        if name in names:
            yield from read_body(source, name, ends)
        analysis = name not in names and header.rpartition(channel)[2].strip().startswith("analysis")
        end = yield from source.until([channel, start, *ends], "reasoning" if analysis else "content")
        source.text = (channel if end == channel else "") + source.text
        yield Event("content")  # a header is not reasoning


def read_body(source: Source, name: str, ends: Sequence[str]) -> Parser[None]:
    """Read a message to a function, whose text is the arguments of the call; without text, they are empty."""
    yield from source.spaces()
    if (yield from source.peek()) == "{":
        yield from arguments_of(source, name)
    elif (yield from source.begins(*ends)) or not (source.text or source.cut):
        yield from (Event("call", name), Event("arguments", "{}"), Event("end"))


def harmony_grammar(functions: Sequence[Function], parallel: bool, markers: Markers) -> str:
    """Grammar rules: `calls` for one call on the channel commentary, which ends the answer."""
    channel, constrain, body = (markers.symbol(one) for one in ("<|channel|>", "<|constrain|>", "<|message|>"))
    calls = []
    for number, function in enumerate(functions):
        to = quoted(f"commentary to={PREFIX}{function.name} ")
        calls.append(f'call_{number}: {channel} {to} {constrain} "json" {body} arguments_{number}\n')
    rules = "".join(arguments_rule(function, number) for number, function in enumerate(functions))
    return f"calls: {' | '.join(f'call_{n}' for n in range(len(functions)))}\n" + "".join(calls) + rules


def harmony_rules(markers: Markers) -> str:
    """Grammar rules: `reasoning` for a message of reasoning, and `final` for the header of an answer."""
    start, channel, body = (markers.symbol(one) for one in ("<|start|>", "<|channel|>", "<|message|>"))
    symbols, rules = markers.up_to("<|end|>", "thought")
    analysis = f'reasoning: {channel} "analysis" {body} {symbols} {start} "assistant"\n'
    return f'{analysis}{rules}final: {channel} "final" {body}\n'
