"""Calls that a request requires, and calls combined with a schema: the grammar follows the format of the chat template,
and the arguments of each tool follow its schema."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import jsonschema
import pytest

from onward import GenerationOptions
from onward.generation.constraint import TextConstraint, constraint
from onward.generation.schemas import prepared
from onward.serving.calls.forms import FORMS, Forms
from onward.serving.calls.markers import Markers

from support.calls import CONTROL, PLAIN, encoded, forms_for, read


def parameters(*colors: str) -> dict[str, Any]:
    """Parameters without a type, with a definition whose name several tools use."""
    following = {"anyOf": [{"$ref": "#/$defs/Next"}, {"type": "null"}]}
    return {
        "properties": {"color": {"$ref": "#/$defs/Color"}, "next": following},
        "required": ["color"],
        "additionalProperties": False,
        "$defs": {
            "Color": {"enum": [*colors], "type": "string", "title": "Color"},
            "Next": {"type": "object", "properties": {"n": {"$ref": "#/$defs/Number"}}, "additionalProperties": False},
            "Number": {"type": "integer", "minimum": 0, "maximum": 9},
        },
    }


SCHEMAS = {"paint": parameters("red", "blue"), "light": parameters("green"), "off": {}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
RED, GREEN = '{"color": "red", "next": {"n": 3}}', '{"color": "green"}'
TAGS = "<tool_call>\n<function={}>\n<parameter=color>\n{}\n</parameter>\n</function>\n</tool_call>"
SPOKEN = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
CALLS = {  # for each format, a call with placeholders for the name and the arguments
    "hermes": '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{{"name": "{}", "arguments": {}}}]',
    "mistral_args": "[TOOL_CALLS]{}[ARGS]{}",
    "llama3_json": '{{"name": "{}", "parameters": {}}}',
    "harmony": SPOKEN,
    "json": '[{{"name": "{}", "arguments": {}}}]',
}
ANSWER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
FINAL = "<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def constrained(forms: Forms, required: bool, schema: Any = None) -> tuple[Forms, TextConstraint]:
    forms, form = forms.constrained(required, schema and prepared(schema, "response_format"))
    tokenizer = forms.markers.tokenizer
    first = constraint(tokenizer, tokenizer.vocab_size, tokenizer.end_ids, GenerationOptions(**form))
    assert first is not None
    return forms, first


def allows(first: TextConstraint, text: str, markers: Markers) -> bool:
    """Whether a constraint allows a text followed by the end token."""
    state = first.copy()
    for token in encoded(text, markers):
        if not state.allowed()[token]:
            return False
        state.accept(token)
    return bool(state.full or state.allowed()[markers.tokenizer.eos_id])


@pytest.mark.parametrize("markers", [PLAIN, CONTROL], ids=["text", "control tokens"])
@pytest.mark.parametrize("form", CALLS)
def test_required_calls_have_the_form_of_the_template_and_the_arguments_of_their_tool(
    form: str, markers: Markers
) -> None:
    _, first = constrained(forms_for(TOOLS, form, markers=markers), True)
    call = CALLS[form].format
    for name, arguments in ("paint", RED), ("light", GREEN), ("off", "{}"), ("off", '{"any": [1, null]}'):
        text = call(name, arguments)
        assert allows(first, text, markers), name
        if form not in ("harmony", "mistral_args"):
            assert allows(first, text.replace("\n", "").replace(', "arg', ',"arg'), markers), name
    for name, arguments in ("paint", GREEN), ("light", RED), ("paint", "{}"), ("none", "{}"), ("paint", '{"n": 3}'):
        assert not allows(first, call(name, arguments), markers), name
    for text in "Hi", "{}", RED, '{"x": 1}':
        assert not allows(first, text, markers)


def test_control_tokens_of_a_form_are_allowed_and_their_spelling_is_not() -> None:
    _, first = constrained(forms_for(TOOLS, "mistral", markers=CONTROL), True)
    assert first.allowed().nonzero().flatten().tolist() == [CONTROL.ids["[TOOL_CALLS]"]]


def test_tags_hold_arguments_of_each_type() -> None:
    properties = {
        "text": {"type": "string"},
        "color": {"$ref": "#/$defs/Color"},
        "many": {"type": "array", "items": {"$ref": "#/$defs/Color"}},
    }
    schema = {"properties": properties, "required": ["color"], "$defs": {"Color": {"enum": ["red", "blue"]}}}
    tools = [{"type": "function", "function": {"name": "paint", "parameters": schema}}]
    text = '<parameter=text>\na </parameter> "b"\n</parameter>\n'.replace("</parameter> ", "<b> ")
    color, many = "<parameter=color>\n{}\n</parameter>\n", "<parameter=many>\n{}\n</parameter>\n"
    for markers in PLAIN, CONTROL:
        forms, first = constrained(forms_for(tools, "qwen3_coder", markers=markers), True)
        assert forms.calls == "qwen3_coder"
        whole = "<tool_call>\n<function=paint>\n{}</function>\n</tool_call>".format
        for inner in color.format("red"), text + color.format("blue"), color.format("red") + many.format('["red"]'):
            assert allows(first, whole(inner), markers), inner
        for inner in "", color.format("green"), color.format("red") + many.format('["green"]'), color.format('"red"'):
            assert not allows(first, whole(inner), markers), inner


STRICT: dict[str, Any] = {  # parameters that a grammar of plain text between tags cannot enforce
    "a pattern": {"properties": {"a": {"type": "string", "pattern": "^x+$"}}},
    "a text or a number": {"properties": {"a": {"type": ["string", "integer"]}}},
    "alternatives": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {"type": "integer"}}},
    "any names": {"additionalProperties": {"type": "integer"}, "properties": {"a": {"pattern": "x"}}},
}


@pytest.mark.parametrize("name", STRICT)
def test_arguments_that_tags_cannot_hold_are_required_as_json(name: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": STRICT[name]}}]
    forms, first = constrained(forms_for(tools, "qwen3_coder"), True)
    assert forms.calls == "json"
    assert allows(first, '[{"name": "f", "arguments": {"a": "xx"}}]', PLAIN) == (
        name in ("a pattern", "any names", "a text or a number")
    )


@pytest.mark.parametrize("form", CALLS)
def test_only_a_parallel_request_has_several_calls(form: str) -> None:
    call = CALLS[form].format
    several = {
        "hermes": "{0}\n{1}",
        "mistral_args": "{0}{1}",
        "mistral": "{0}, {1}",
        "json": "{0}, {1}",
    }
    if form not in several:
        return
    one, other = call("light", GREEN), call("off", "{}")
    if form in ("mistral", "json"):
        one, other = one[:-1], other[other.index("{") :]
    text = several[form].format(one, other)
    for parallel in True, False:
        _, first = constrained(forms_for(TOOLS, form, parallel=parallel), True)
        assert allows(first, text, PLAIN) == parallel


@pytest.mark.parametrize("markers", [PLAIN, CONTROL], ids=["text", "control tokens"])
@pytest.mark.parametrize("form", CALLS)
def test_a_schema_beside_tools_allows_a_call_or_the_schema(form: str, markers: Markers) -> None:
    _, first = constrained(forms_for(TOOLS, form, markers=markers), False, ANSWER)
    final = FINAL if form == "harmony" else ""
    assert allows(first, CALLS[form].format("light", GREEN), markers)
    assert allows(first, final + '{"x": 1}', markers)
    assert not allows(first, final + '{"y": 1}', markers)
    assert not allows(first, CALLS[form].format("light", RED), markers)


@pytest.mark.parametrize("markers", [PLAIN, CONTROL], ids=["text", "control tokens"])
def test_a_model_may_reason_before_a_constrained_answer(markers: Markers) -> None:
    call = CALLS["hermes"].format("light", GREEN)
    for name, begin, end in ("think", "<think>", "</think>"), ("mistral", "[THINK]", "[/THINK]"):
        for tools, required, answer in (TOOLS, True, call), ([], False, '{"x": 1}'):
            free = forms_for(tools, "hermes", name, markers)
            _, first = constrained(free, required, ANSWER)
            assert allows(first, answer, markers)
            assert allows(first, f"{begin}\nHm <a>\n{end}\n\n{answer}", markers)
            assert not allows(first, f"{begin}Hm {end}Hi", markers)
            assert not allows(first, f"{begin}Hm {answer}", markers)
            _, first = constrained(forms_for(tools, "hermes", name, markers, opened=True), required, ANSWER)
            assert allows(first, f"Hm{end}{answer}", markers)
            assert not allows(first, answer, markers)
            _, first = constrained(forms_for(tools, "hermes", name, markers, closed=True), required, ANSWER)
            assert allows(first, answer, markers)
            assert not allows(first, f"{begin}Hm{end}{answer}", markers)
    _, first = constrained(forms_for(TOOLS, "harmony", "harmony", markers), True)
    assert allows(first, THOUGHT + SPOKEN.format("light", GREEN), markers)
    _, first = constrained(forms_for([], "harmony", "harmony", markers), False, ANSWER)
    assert allows(first, THOUGHT + FINAL + '{"x": 1}', markers)
    assert not allows(first, '{"x": 1}', markers)


def random_answer(generator: random.Random, first: TextConstraint, eos: int) -> list[int] | None:
    """Random tokens that a constraint allows, up to the end of the answer; None if it has no end within 400 tokens."""
    state, tokens = first.copy(), list[int]()
    for _ in range(400):
        allowed = state.allowed().nonzero().flatten().tolist()
        closing = (
            [token for token in allowed if token == eos or bytes([token % 256]) in b'"}]>\n']
            if len(allowed) > 20
            else []
        )
        token = generator.choice(closing if closing and generator.random() < 0.5 else allowed)
        if token == eos:
            return tokens
        tokens.append(token)
        if not state.accept(token):
            return tokens
    return None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [6, pytest.param(300, marks=pytest.mark.long)])
def test_random_required_answers_are_read_as_calls_that_conform(form: str, count: int) -> None:
    generator = random.Random(46)
    ended = 0
    for markers in PLAIN, CONTROL:
        reasoning = "harmony" if form == "harmony" else "none"
        forms, first = constrained(forms_for(TOOLS[:2], form, reasoning, markers), True)
        for _ in range(count):
            tokens = random_answer(generator, first, markers.tokenizer.end_ids[0])
            if tokens is None:
                continue
            ended += 1
            events = read(forms, [markers.marked(tokens)])
            assert {kind for kind, _ in events} - {"reasoning"} == {"call", "arguments", "end"}
            for (kind, name), (_, arguments) in pairwise(events):
                if kind == "call":
                    jsonschema.validate(json.loads(arguments), {**SCHEMAS[name], "type": "object"})
    assert ended > count
