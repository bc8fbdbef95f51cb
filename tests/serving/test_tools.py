"""Calls of tools: read from an answer in any pieces, and constrained to the schemas of a request."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.serving.errors import ApiError
from onward.serving.tools import BARE, MARKERS, Markers, ToolCall, Tools, ToolText, markers_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "time")]
HERMES, MISTRAL, LLAMA = MARKERS
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
OTHER = '{"name": "time", "parameters": {"city": "Rome"}}'
CALLS = {  # markers, the text of an answer, its content and the names of its calls
    "one": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", ["weather"]),
    "two": (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>", "", ["weather", "time"]),
    "after text": (HERMES, f"I ask. <tool_call>{CALL}</tool_call>", "I ask. ", ["weather"]),
    "no call": (HERMES, "It rains <in Oslo>.", "It rains <in Oslo>.", []),
    "an unknown tool": (HERMES, '<tool_call>{"name": "x"}</tool_call>', '<tool_call>{"name": "x"}</tool_call>', []),
    "no JSON": (HERMES, "<tool_call>weather</tool_call>!", "<tool_call>weather</tool_call>!", []),
    "cut off": (HERMES, '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    "a list": (MISTRAL, f"[TOOL_CALLS][{CALL}, {OTHER}]", "", ["weather", "time"]),
    "without its control token": (MISTRAL, f" [{CALL}]", "", ["weather"]),
    "bare": (BARE, CALL, "", ["weather"]),
    "bare text": (BARE, "It is {fine}.", "It is {fine}.", []),
    "bare JSON": (BARE, '{"a": 1}', '{"a": 1}', []),
    "python tag": (LLAMA, f"<|python_tag|>{OTHER}", "", ["time"]),
}


def read(markers: Markers, pieces: list[str], choice: Any = "auto") -> tuple[str, list[ToolCall]]:
    text = ToolText(Tools.of(TOOLS, choice, None), markers)
    parts = [text.push(piece) for piece in pieces] + [text.finish()]
    return "".join(content for content, _ in parts), [call for _, calls in parts for call in calls]


@pytest.mark.parametrize("name", CALLS)
@given(data=st.data())
def test_calls_are_read_however_the_answer_is_cut(name: str, data: st.DataObject) -> None:
    markers, text, expected, names = CALLS[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    content, calls = read(markers, pieces)
    assert (content, [call.name for call in calls]) == (expected, names)
    assert all(json.loads(call.arguments)["city"] for call in calls)


def test_content_is_not_delayed_longer_than_a_marker_needs() -> None:
    text = ToolText(Tools.of(TOOLS, "auto", None), HERMES)
    assert [text.push(piece)[0] for piece in ("It", " is <", "b> and <tool", " x")] == [
        "It",
        " is ",
        "<b> and ",
        "<tool x",
    ]


def test_a_named_tool_takes_the_whole_answer_as_its_arguments() -> None:
    named = {"type": "function", "function": {"name": "time"}}
    tools = Tools.of(TOOLS, named, None)
    assert tools.schema() == SCHEMA
    content, (call,) = read(HERMES, ['{"city": ', '"Rome"}'], named)
    assert (content, call.name, call.arguments) == ("", "time", '{"city": "Rome"}')


def test_required_calls_are_a_list_that_only_a_parallel_request_makes_longer() -> None:
    schema = Tools.of(TOOLS, "required", False).schema()
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert "maxItems" not in Tools.of(TOOLS, "required", None).schema()
    assert [call.name for call in read(HERMES, [f"[{CALL}]"], "required")[1]] == ["weather"]


def test_markers_are_those_of_the_chat_template() -> None:
    assert markers_of("... <tool_call> ...") == HERMES
    assert markers_of("nothing") == BARE


WRONG: dict[str, tuple[Any, Any, str]] = {
    "no name": ([{"type": "function", "function": {}}], None, "tools[0] is not a function with a name"),
    "another type": ([{"type": "web_search"}], None, "tools[0] is not a function"),
    "no schema": ([{"type": "function", "function": {"name": "f", "parameters": [1]}}], None, "are not a JSON schema"),
    "an unknown choice": (TOOLS, "all", "tool_choice is 'all'"),
    "an unknown name": (TOOLS, {"function": {"name": "f"}}, "which is not among the tools"),
    "required without tools": ([], "required", "there are no tools"),
    "too many": (TOOLS * 100, None, "give at most 128"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tools_are_named(name: str) -> None:
    tools, choice, message = WRONG[name]
    with pytest.raises(ApiError) as caught:
        Tools.of(tools, choice, None)
    assert message in str(caught.value)
