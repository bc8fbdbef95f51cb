"""Tools in a conversation: the tools that a request offers, and the tool calls in an answer.

With tool_choice auto, the model writes calls in the format of its chat template, as JSON between markers. If
tool_choice is required or names a tool, a JSON schema constrains the answer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onward.serving.errors import ApiError
from onward.serving.shapes import shown

MOST_TOOLS = 128


@dataclass(frozen=True)
class Markers:
    """The texts that a family of models writes before and after the JSON of a tool call. Without an `end`, a call
    extends to the end of the answer. Its `begin` may then be a control token, which the text of the answer does not
    contain, so a call may also begin directly with its JSON."""

    begin: str
    end: str = ""


MARKERS = (  # of published models; the first one whose `begin` is in the chat template is used
    Markers("<tool_call>", "</tool_call>"),  # Qwen, Hermes
    Markers("[TOOL_CALLS]"),  # Mistral
    Markers("<|python_tag|>"),  # Llama 3
)
BARE = Markers("")  # no markers: the entire answer is JSON


@dataclass(frozen=True)
class ToolCall:
    """A tool call in an answer: the name of the tool, and its arguments as JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def record(self) -> dict[str, Any]:
        """Return the call as a JSON object, in the form of chat completions."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Tools:
    """The tools that a request offers, as functions, and the rules for their use. `choice` is none, auto, required or
    the name of the tool that the model must call. Without `parallel`, an answer with the choice required has exactly
    one call."""

    functions: Sequence[dict[str, Any]]
    choice: str = "auto"
    parallel: bool = True

    @classmethod
    def of(cls, tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> Tools:
        """Read the fields tools, tool_choice and parallel_tool_calls of a request. Raises an ApiError that names the
        field at fault."""
        if len(tools or ()) > MOST_TOOLS:
            raise ApiError(f"there are {len(tools or ())} tools: give at most {MOST_TOOLS}", param="tools")
        functions = [function_of(tool, number) for number, tool in enumerate(tools or ())]
        names = [function["name"] for function in functions]
        if isinstance(choice, dict):
            named = choice.get("function")
            choice = named.get("name") if isinstance(named, dict) else choice.get("name")
            if choice not in names:
                raise ApiError(f"tool_choice names {shown(choice)}, which is not among the tools", param="tool_choice")
        elif choice not in (None, "none", "auto", "required"):
            raise ApiError(
                f"tool_choice is {shown(choice)}: give none, auto, required or a function", param="tool_choice"
            )
        elif choice == "required" and not names:
            raise ApiError("tool_choice is required and there are no tools: give some", param="tool_choice")
        return cls(functions, choice or "auto" if names else "none", parallel is not False)

    @property
    def named(self) -> str:
        """The name of the tool that the model must call; "" if the model chooses."""
        return "" if self.choice in ("none", "auto", "required") else self.choice

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema that constrains the entire answer: a list of tool calls or, if the request names a
        tool, the arguments of this tool; None if the model chooses whether to call a tool."""
        if self.named:
            return next(parameters_of(function) for function in self.functions if function["name"] == self.named)
        if self.choice != "required":
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": parameters_of(function)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for function in self.functions
        ]
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        return schema if self.parallel else schema | {"maxItems": 1}


def function_of(tool: Any, number: int) -> dict[str, Any]:
    """Return the function (name, description, parameters) of a tool, which has the format of chat completions or of
    responses. Raises an ApiError that names the tool's index `number` if the tool is malformed."""
    function = tool.get("function", tool) if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ApiError(
            f"tools[{number}] is not a function with a name: write type, function and its name",
            param=f"tools[{number}]",
        )
    if not isinstance(function.get("parameters") or {}, dict):
        message = f"the parameters of tools[{number}] are not a JSON schema: give an object"
        raise ApiError(message, param=f"tools[{number}]")
    return {name: value for name, value in function.items() if name in ("name", "description", "parameters", "strict")}


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments; any object if the function declares none."""
    return function.get("parameters") or {"type": "object"}


def markers_of(template: str) -> Markers:
    """Return the markers of tool calls for a model with the chat template `template`, according to the template's
    source; BARE if it contains no known markers."""
    return next((markers for markers in MARKERS if markers.begin in template), BARE)


class ToolText:
    """Splits the streamed text of an answer into content and tool calls. Text that may belong to a call is held back.

    If the request requires a call (`forced`), the entire answer is JSON: a list of calls or, for a named tool, the
    arguments of this tool.
    """

    def __init__(self, tools: Tools, markers: Markers) -> None:
        self.tools, self.markers, self.forced = tools, markers, tools.schema() is not None
        self.pending = ""  # text that may belong to a call
        self.inside = False  # whether `pending` continues a call after its `begin`
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Append text of the answer; returns the new content and the newly complete tool calls."""
        if self.tools.choice == "none":
            return text, []
        self.pending += text
        if self.forced:
            return "", []
        content, calls = "", list[ToolCall]()
        while True:
            if not self.inside:
                start, size = self.start()
                content, self.pending = content + self.pending[:start], self.pending[start:]
                if not size:
                    return content, calls
                self.inside, self.pending = True, self.pending[size:]
            if not self.markers.end or self.markers.end not in self.pending:
                return content, calls
            inner, _, rest = self.pending.partition(self.markers.end)
            new_calls = self.read(inner)
            content += "" if new_calls else self.markers.begin + inner + self.markers.end
            calls += new_calls
            self.inside, self.pending = False, rest.lstrip() if new_calls else rest

    def start(self) -> tuple[int, int]:
        """Return the index in the pending text at which a tool call begins, and the length of its `begin`, as (index,
        length). Without a call, the index is the number of characters that are content, and the length is 0."""
        begin, text = self.markers.begin, self.pending
        if begin and (at := text.find(begin)) >= 0:
            return at, len(begin)
        if not self.markers.end and self.num_calls == 0:  # a call may begin at the first character of the answer
            first = text.lstrip()[:1]
            if not first or first in "{[":
                return 0, 0 if begin.startswith(text.lstrip()) else len(text) - len(text.lstrip())
            self.num_calls = -1  # the answer begins with content
        held = next((n for n in range(min(len(begin) - 1, len(text)), 0, -1) if text.endswith(begin[:n])), 0)
        return len(text) - held, 0

    def finish(self) -> tuple[str, list[ToolCall]]:
        """End the answer; returns the remaining content and the last tool calls."""
        text, self.pending = self.pending, ""
        if self.tools.named:
            return "", [ToolCall(self.tools.named, text)] if text else []
        if self.forced or self.inside or text.lstrip()[:1] in ("{", "["):
            if calls := self.read(text):
                return "", calls
            return (self.markers.begin if self.inside else "") + text, []
        return text, []

    def read(self, text: str) -> list[ToolCall]:
        """Return the tool calls in `text`, the JSON of one call or of a list of calls; [] for any other text, and for
        calls of unknown tools."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls = []
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, dict) or call.get("name") not in [f["name"] for f in self.tools.functions]:
                return []
            arguments = call.get("arguments", call.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(ToolCall(call["name"], text))
        self.num_calls += len(calls)
        return calls
