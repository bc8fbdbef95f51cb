"""Calls as JSON, alone or between markers: the formats of Hermes, Llama 3.1 and Mistral, and bare JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from onward.serving.calls.markers import Markers
from onward.serving.calls.schemas import Function, arguments_rule, calls_schema
from onward.serving.calls.source import Event, Kind, Parser, Source

ARGUMENTS = "arguments", "parameters"
KEYS = frozenset({"name", "type", "id", *ARGUMENTS})  # keys of a call


def json_value(source: Source, kind: Kind | None = None, depth: int = 0) -> Parser[tuple[str, bool]]:
    """Read a JSON value; return its text, and whether it is complete. With `kind`, the text is also passed on as it
    arrives; `depth` brackets were opened before."""
    yield from source.peek()
    bare = not depth and source.text[:1] not in ("{", "[", '"')  # a number, true, false or null
    read, in_string, escaped = "", False, False
    while True:
        end = -1
        for at, char in enumerate(source.text):
            if in_string:
                in_string, escaped = escaped or char != '"', char == "\\" and not escaped
                closed = not in_string and not depth
            elif bare:
                if char in ",]}" or char.isspace():
                    end = at
                    break
                continue
            else:
                in_string = char == '"'
                depth += (char in ("{", "[")) - (char in ("}", "]"))
                closed = not depth and not in_string
            if closed:
                end = at + 1
                break
        piece = source.take(len(source.text) if end < 0 else end)
        read += piece
        if kind and piece:
            yield Event(kind, piece)
        if end >= 0 or source.ended:
            return read, end >= 0
        yield None


def json_call(source: Source, names: Collection[str], lead: str, bare: bool) -> Parser[bool]:
    """Read a call as a JSON object, which begins the text; return whether it calls a tool in `names`. Any other object
    is content, after the text `lead`. With `bare`, an object that has other keys or lacks arguments is not a call."""
    read, name, arguments = lead + source.take(1), "", None if bare else "null"
    while True:
        read += yield from source.spaces()
        char = yield from source.peek()
        if char in ("}", ","):
            read += source.take(1)
            if char == "}":
                break
            continue
        key, _ = (yield from json_value(source)) if char == '"' else ("", False)
        read += key + (yield from source.spaces())
        if not source.text and source.ended and could_be(key, KEYS):
            return (yield from incomplete(source, read))
        key = parsed(key)
        if (yield from source.peek()) != ":" or (bare and key not in KEYS):
            yield Event("content", read)
            return False
        read += source.take(1) + (yield from source.spaces())
        if key in ARGUMENTS and name and (yield from source.peek()) == "{":
            yield from arguments_of(source, name)
            if not (yield from source.skip("}")) and (yield from source.begins(",")):
                yield from json_value(source, depth=1)  # further keys
            return True
        value, whole = yield from json_value(source)
        read += value
        if not whole and (key != "name" or could_be(value, names)):
            return (yield from incomplete(source, read))
        if key == "name":
            name = parsed(value)
            if not isinstance(name, str) or name not in names:
                yield Event("content", read)
                yield from json_value(source, "content", depth=1)
                return False
        elif key in ARGUMENTS:
            arguments = value
    text = object_of(arguments) if name and arguments else ""
    if not text:
        yield Event("content", read)
        return False
    yield from (Event("call", name), Event("arguments", text), Event("end"))
    return True


def arguments_of(source: Source, name: str) -> Parser[None]:
    """Read the arguments of a call, a JSON object that begins the text."""
    yield Event("call", name)
    _, whole = yield from json_value(source, "arguments")
    if whole:
        yield Event("end")


def incomplete(source: Source, read: str) -> Parser[bool]:
    """End a call whose name and arguments have not arrived: drop the call if the answer was cut off, otherwise pass on
    its text as content."""
    if not source.cut:
        yield Event("content", read)
    return source.cut


def object_of(value: str) -> str:
    """The arguments of a call as a JSON object; "" if they are not an object. null and an empty string mean no
    arguments; a JSON string is decoded and must contain an object."""
    inner = parsed(value)
    text = inner if isinstance(inner, str) else value
    if value == "null" or inner == "":
        return "{}"
    return text if isinstance(parsed(text), dict) else ""


def parsed(text: str) -> Any:
    """The value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None


def no_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity, which Python reads and JSON lacks


def could_be(value: str, texts: Collection[str]) -> bool:
    """Whether a JSON string that may be cut off is the beginning of one of these texts."""
    return any(json.dumps(text, ensure_ascii=False).startswith(value) for text in texts)


def json_list(source: Source, names: Collection[str], lead: str, bare: bool = False) -> Parser[bool]:
    """Read calls as JSON objects, in a list or one after another; return whether there are any. Other text is content,
    after `lead`."""
    listed = called = False
    while True:
        space = yield from source.spaces()
        char = yield from source.peek()
        lead = "" if called else lead + space
        if char == "{":
            if not (yield from json_call(source, names, lead, bare)):
                return called
            called = True
        elif char == "[" and not listed and not called:
            listed, lead = True, lead + source.take(1)
        elif called and char in ((",", "]") if listed else (";",)):
            source.take(1)
            if char == "]":
                return True
        elif not char and not called:
            return (yield from incomplete(source, lead))
        else:
            if lead:
                yield Event("content", lead)
            return called


def bare_calls(source: Source, names: Collection[str], marker: str = "") -> Parser[None]:
    """Read calls as JSON without the marker that usually precedes them."""
    space = yield from source.spaces()
    if (yield from source.peek()) in ("{", "[") and not (marker and (yield from source.begins(marker))):
        yield from json_list(source, names, space, bare=True)
    elif space:
        yield Event("content", space)


def read_hermes(source: Source, functions: Sequence[Function], markers: Markers) -> Parser[None]:
    """Read calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    names = [function.name for function in functions]
    begin, end = markers.text("<tool_call>"), markers.text("</tool_call>")
    while (yield from source.until([begin], "content")):
        if (yield from json_list(source, names, begin)):
            yield from source.skip(end)


def read_llama(source: Source, functions: Sequence[Function], markers: Markers) -> Parser[None]:
    """Read calls as JSON, at the beginning or after `<|python_tag|>`."""
    names, begin = [function.name for function in functions], markers.text("<|python_tag|>")
    yield from bare_calls(source, names, begin)
    while (yield from source.until([begin], "content")):
        yield from json_list(source, names, begin)


def read_mistral(source: Source, functions: Sequence[Function], markers: Markers) -> Parser[None]:
    """Read calls as `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, where the marker may be missing, or in newer
    models as `[TOOL_CALLS]name[ARGS]{...}`."""
    names = [function.name for function in functions]
    begin, identity, middle = (markers.text(one) for one in ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))
    yield from bare_calls(source, names, begin)
    while (yield from source.until([begin], "content")):
        space = yield from source.spaces()
        if (yield from source.peek()) in ("{", "["):
            yield from json_list(source, names, begin + space)
            continue
        header, marker = yield from source.before([middle, "{", begin])
        name = header.partition(identity)[0].strip()
        source.text = (marker if marker != middle else "") + source.text
        if name in names and marker == middle:
            space = yield from source.spaces()
        if name in names and (yield from source.peek()) == "{":
            yield from arguments_of(source, name)
        elif name in names and marker == middle and source.cut and not source.text:
            return  # the arguments have not arrived
        elif name in names and marker:  # no arguments
            yield from (Event("call", name), Event("arguments", "{}"), Event("end"))
        elif marker or not any(other.startswith(name) for other in names):
            yield Event("content", begin + space + header + (marker if marker == middle else ""))
        else:
            yield from incomplete(source, begin + space + header)


def read_json(source: Source, functions: Sequence[Function], markers: Markers) -> Parser[None]:
    yield from bare_calls(source, [function.name for function in functions])
    yield from source.until([], "content")


def json_rules(functions: Sequence[Function]) -> str:
    """Grammar rules: `call` for one call as JSON, and SPACE for white space."""
    rules = ["SPACE: /[ \\n]/\n"]
    for number, function in enumerate(functions):
        name, key = quoted(quoted(function.name)), quoted('"arguments":')
        inner = f'"\\"name\\":" SPACE? {name} "," SPACE? {key} SPACE? arguments_{number}'
        rules.append(f'call_{number}: "{{" SPACE? {inner} SPACE? "}}"\n{arguments_rule(function, number)}')
    return f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}\n" + "".join(rules)


def quoted(text: str) -> str:
    """A text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def hermes_grammar(functions: Sequence[Function], parallel: bool, markers: Markers) -> str:
    begin, end = markers.symbol("<tool_call>"), markers.symbol("</tool_call>")
    more = " (SPACE? one)*" if parallel else ""
    return f"calls: one{more}\none: {begin} SPACE? call SPACE? {end}\n" + json_rules(functions)


def mistral_grammar(functions: Sequence[Function], parallel: bool, markers: Markers) -> str:
    more = ' ("," SPACE? call)*' if parallel else ""
    return f'calls: {markers.symbol("[TOOL_CALLS]")} SPACE? "[" call{more} "]"\n' + json_rules(functions)


def named_grammar(functions: Sequence[Function], parallel: bool, markers: Markers) -> str:
    begin, middle = markers.symbol("[TOOL_CALLS]"), markers.symbol("[ARGS]")
    calls = [f"{begin} {quoted(one.name)} {middle} arguments_{number}" for number, one in enumerate(functions)]
    rules = "".join(arguments_rule(function, number) for number, function in enumerate(functions))
    return f"calls: call{'+' if parallel else ''}\ncall: {' | '.join(calls)}\n" + rules


def llama_schema(functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
    return calls_schema(functions, "parameters")  # without a marker, Llama 3.1 makes one call at a time


def json_schema(functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
    call = calls_schema(functions, "arguments")
    items = {"type": "array", "minItems": 1, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}
    return items if parallel else items | {"maxItems": 1}
