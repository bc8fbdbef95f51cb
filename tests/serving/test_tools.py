"""The tools of a request, and the rules for their use."""

from typing import Any

import pytest

from onward.serving.errors import ApiError
from onward.serving.tools import Tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMES = ["weather", "time", "news"]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
CHAT_CHOICE = {"type": "function", "function": {"name": "time"}}
FLAT_CHOICE = {"type": "function", "name": "time"}
SOME: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("news", "time")]

# tool_choice, whether a call is required, tools in the prompt, callable tools
CHOICES: dict[str, tuple[Any, bool, list[str], list[str]]] = {
    "by default": (None, False, NAMES, NAMES),
    "auto": ("auto", False, NAMES, NAMES),
    "none": ("none", False, NAMES, []),
    "required": ("required", True, NAMES, NAMES),
    "named": (CHAT_CHOICE, True, NAMES, ["time"]),
    "named in responses": (FLAT_CHOICE, True, NAMES, ["time"]),
    "some": ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": SOME}}, False, NAMES[1:], NAMES[1:]),
    "some in responses": (
        {"type": "allowed_tools", "mode": "required", "tools": [FLAT_CHOICE]},
        True,
        ["time"],
        ["time"],
    ),
}


@pytest.mark.parametrize("tools", [TOOLS, FLAT], ids=["chat", "responses"])
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_says_which_tools_may_or_must_be_called(name: str, tools: list[Any]) -> None:
    choice, required, shown, callable = CHOICES[name]
    read = Tools.of(tools, choice, None)
    assert read.required == required
    assert [function.name for function in read.functions] == shown
    assert [function.name for function in read.callable] == callable


@pytest.mark.parametrize("given", [None, {}, {"properties": {"a": {}}}, {"type": ["object", "null"]}])
def test_arguments_are_an_object_whatever_the_schema_leaves_out(given: Any) -> None:
    (function,) = Tools.of([{"type": "function", "name": "f", "parameters": given}], None, None).functions
    assert function.parameters == {**(given or {}), "type": "object"}


WRONG: dict[str, tuple[Any, Any, str]] = {
    "no name": ([{"type": "function", "function": {}}], None, "tools[0] is not a function with a name"),
    "another type": ([{"type": "web_search"}], None, "tools[0] is not a function"),
    "no schema": ([{"type": "function", "function": {"name": "f", "parameters": [1]}}], None, "are not a JSON schema"),
    "no object": ([{"type": "function", "name": "f", "parameters": {"type": "array"}}], None, 'have the type "array"'),
    "an unknown choice": (TOOLS, "all", 'tool_choice is "all"'),
    "an unknown name": (TOOLS, {"function": {"name": "f"}}, "which is not among the tools"),
    "an unknown name among some": (
        TOOLS,
        {"type": "allowed_tools", "tools": [{"name": "f"}]},
        'Cannot call "f" of',
    ),
    "none of the tools": (TOOLS, {"type": "allowed_tools", "allowed_tools": {}}, "allows no tools"),
    "an unknown mode": (TOOLS, {"type": "allowed_tools", "mode": "all", "tools": [FLAT_CHOICE]}, "mode of tool_choice"),
    "required without tools": ([], "required", "without tools"),
    "too many": (TOOLS * 100, None, "give at most 128"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tools_are_named(name: str) -> None:
    tools, choice, message = WRONG[name]
    with pytest.raises(ApiError) as caught:
        Tools.of(tools, choice, None)
    assert message in str(caught.value)
