"""Calls as Qwen3-Coder writes them: each argument is plain text between tags of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from onward.generation.schemas import json_rule
from onward.serving.calls.json_calls import incomplete, parsed, quoted
from onward.serving.calls.markers import Markers
from onward.serving.calls.schemas import TYPES, Function, moved, resolved, types_of
from onward.serving.calls.source import Event, Parser, Source, overlap

FUNCTION, CALL_END, PARAMETER, VALUE_END = "<function=", "</function>", "<parameter=", "</parameter>"
FOLLOWING = PARAMETER, CALL_END, "</tool_call>"  # tags: one of them follows the end of an argument
CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # Python's literals, which models also write
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"})
END = re.compile(rf"\n?{VALUE_END}(?=\s*(?:{'|'.join(FOLLOWING)}))")
OBJECT = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}


def read_xml(source: Source, functions: Sequence[Function], markers: Markers) -> Parser[None]:
    """Read calls as `<tool_call><function=NAME><parameter=X>value</parameter></function></tool_call>`, where
    `<tool_call>` may be missing."""
    begin, end = markers.text("<tool_call>"), markers.text("</tool_call>")
    by_name = {function.name: function for function in functions}
    while marker := (yield from source.until([begin, FUNCTION], "content")):
        if marker == begin:
            marker += yield from source.spaces()
            if not (yield from source.begins(FUNCTION)):
                if source.ended and FUNCTION.startswith(source.text):
                    yield from incomplete(source, marker + source.take(len(source.text)))
                else:
                    yield Event("content", marker)
                continue
            marker += source.take(len(FUNCTION))
        name, closed = yield from source.before([">"])
        if not closed and any(other.startswith(name) for other in by_name):
            yield from incomplete(source, marker + name)
        elif name not in by_name:
            yield Event("content", marker + name + closed)
        else:
            if (yield from read_arguments(source, by_name[name], marker + name + closed)):
                yield Event("end")
            yield from source.skip(CALL_END)
            yield from source.skip(end)


def read_arguments(source: Source, function: Function, lead: str) -> Parser[bool]:
    """Read the arguments of a call after its beginning `lead`, and pass on the call, with the arguments as a JSON
    object with the schema's types; return whether they are complete."""
    schema, before = function.parameters, ""
    properties = resolved(schema, schema).get("properties") or {}
    while (yield from source.skip(PARAMETER)):
        name, closed = yield from source.before([">"])
        if not closed:
            if not before:
                yield from incomplete(source, f"{lead}{PARAMETER}{name}")
            return False
        if not before:
            yield Event("call", function.name)
        yield Event("arguments", f"{before or '{'}{quoted(name)}: ")
        before = ", "
        types = types_of(properties.get(name), schema)
        if not (yield from read_value(source, types)):
            return False
    rest = source.text.lstrip()
    if source.cut and not rest.startswith(CALL_END) and any(tag.startswith(rest) for tag in (CALL_END, PARAMETER)):
        source.text = ""
        return False
    if not before:
        yield Event("call", function.name)
    yield Event("arguments", "}" if before else "{}")
    return True


def read_value(source: Source, types: set[str]) -> Parser[bool]:
    """Read an argument up to the tag that ends it, and pass it on as JSON; return whether it is complete. The tag
    counts only if another tag follows."""
    text, streamed = "", types == {"string"}
    if (yield from source.peek()) == "\n":
        source.take(1)
    if streamed:
        yield Event("arguments", '"')
    while True:
        found = END.search(source.text)
        piece = source.take(found.start() if found else undecided(source.text))
        text += piece
        if streamed and piece:
            yield Event("arguments", quoted(piece)[1:-1])
        if found or source.ended:
            break
        yield None
    whole = yield from source.skip(VALUE_END)
    if whole:
        yield Event("arguments", '"' if streamed else json_of(text, types))
    else:
        source.text = ""  # the beginning of a tag
    return whole


def undecided(text: str) -> int:
    """Index from which a text may begin the tags that end an argument, or the line break before them."""
    at = text.rfind(VALUE_END)
    rest = text[at + len(VALUE_END) :].lstrip()
    if at < 0 or not any(tag.startswith(rest) for tag in FOLLOWING):
        at = len(text) - overlap(text, VALUE_END)
    return at - text[:at].endswith("\n")


def json_of(text: str, types: set[str]) -> str:
    """An argument as the JSON value that it spells; as a string if it spells none, or if `types` has string but not the
    type of this value."""
    spelled = CONSTANTS.get(text.strip(), text.strip())
    value = parsed(spelled)
    if value is None and spelled != "null":
        return quoted(text)
    kind = TYPES.get(type(value), "null")
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return spelled if fits or "string" not in types else quoted(text)


def xml_grammar(functions: Sequence[Function], parallel: bool, markers: Markers) -> str | None:
    """Rules of calls between tags; None if a grammar cannot constrain an argument as plain text, such as a string with
    a pattern."""
    begin, end = markers.symbol("<tool_call>"), markers.symbol("</tool_call>")
    rules = []
    for number, function in enumerate(functions):
        symbols = parameter_rules(function, number)
        if symbols is None:
            return None
        rules.append(
            f'call_{number}: "<function=" {quoted(function.name + ">")} "\\n" {symbols[0]} "</function>"\n{symbols[1]}'
        )
    calls = " | ".join(f"call_{number}" for number in range(len(functions)))
    more = ' ("\\n" one)*' if parallel else ""
    return f'calls: one{more}\none: {begin} "\\n" ({calls}) "\\n" {end}\n' + "".join(rules)


def parameter_rules(function: Function, number: int) -> tuple[str, str] | None:
    """Return (symbols, rules) for the arguments; None if the schema has other constraints than those on single
    arguments, or if a grammar cannot constrain an argument as plain text."""
    root = function.parameters
    schema = resolved(root, root)
    properties = schema.get("properties") or {}
    if not schema.keys() - {"$ref"} <= OBJECT or not properties.keys() >= set(schema.get("required") or ()):
        return None
    symbols, rules = [], []
    for place, (name, given) in enumerate(properties.items()):
        one, rule = f"parameter_{number}_{place}", f"value_{number}_{place}"
        inner, types = resolved(given, root), types_of(given, root)
        tail = quoted("\n" + VALUE_END + "\n")
        if types == {"string"} and inner.keys() <= ANNOTATIONS | {"type", "$defs"}:
            rules.append(f"{rule}[lazy]: /(?s:.*)\\n<\\/parameter>\\n/\n")
        elif types == {"string"} and inner.keys() <= ANNOTATIONS | {"type", "enum", "const", "$defs"}:
            values = inner["enum"] if "enum" in inner else [inner["const"]]
            rules.append(f"{rule}: ({' | '.join(map(quoted, values))}) {tail}\n")
        elif types and "string" not in types:
            rules.append(f"{rule}: json_{rule} {tail}\n")
            value = json_rule(within(given, root), f"{function.field}.parameters.properties.{name}")
            rules.append(f"json_{rule}: {value}\n")
        else:
            return None
        rules.append(f"{one}: {quoted(PARAMETER + name + '>' + chr(10))} {rule}\n")
        symbols.append(one if name in (schema.get("required") or ()) else one + "?")
    return " ".join(symbols), "".join(rules)


def within(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema inside `root` as a separate schema, with `root` among its definitions if it refers to `root`."""
    if not isinstance(schema, Mapping) or '"$ref"' not in json.dumps(schema):
        return schema
    return {**moved(schema, "root"), "$defs": {"root": moved(root, "root")}}
