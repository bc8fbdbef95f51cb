"""The tools that a request offers to the model, and the rules for their use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onward.serving.calls.schemas import Function
from onward.serving.errors import ApiError
from onward.serving.shapes import shown

MOST_TOOLS = 128


@dataclass(frozen=True)
class Tools:
    """The tools of a request, and the rules for their use. `choice` is none, auto, required or the name of the tool
    that must be called; without `parallel`, an answer has at most one call."""

    functions: Sequence[Function] = ()
    choice: str = "none"
    parallel: bool = True

    @classmethod
    def of(cls, tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> Tools:
        """Read tools, tool_choice and parallel_tool_calls; an ApiError names the field at fault."""
        if len(tools or ()) > MOST_TOOLS:
            raise ApiError(f"there are {len(tools or ())} tools: give at most {MOST_TOOLS}", param="tools")
        functions = [function_of(tool, number) for number, tool in enumerate(tools or ())]
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            choice, functions = allowed(choice.get("allowed_tools", choice), functions)
        elif isinstance(choice, Mapping):
            choice = named_in(choice, functions)
        elif choice not in (None, "none", "auto", "required"):
            raise ApiError(
                f"tool_choice is {shown(choice)}: give none, auto, required or a function", param="tool_choice"
            )
        elif choice == "required" and not functions:
            raise ApiError("Cannot require a call without tools: give some", param="tool_choice")
        return cls(functions, choice or "auto" if functions else "none", parallel is not False)

    @property
    def named(self) -> str:
        """The tool that the model must call; "" if the model chooses."""
        return "" if self.choice in ("none", "auto", "required") else self.choice

    @property
    def required(self) -> bool:
        return self.choice not in ("none", "auto")

    @property
    def callable(self) -> Sequence[Function]:
        if self.choice == "none":
            return ()
        return [one for one in self.functions if one.name == self.named] if self.named else self.functions


def named_in(choice: Mapping[str, Any], functions: Sequence[Function]) -> str:
    """The name of the tool in an item of tool_choice, in the format of chat completions or of responses."""
    inner = choice.get("function")
    name = inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
    if name is None:
        raise ApiError("tool_choice names no function: write type, function and its name", param="tool_choice")
    if not isinstance(name, str) or name not in [function.name for function in functions]:
        raise ApiError(
            f"Cannot call {shown(name)} of tool_choice, which is not among the tools: name one of them",
            param="tool_choice",
        )
    return name


def allowed(choice: Any, functions: Sequence[Function]) -> tuple[str, list[Function]]:
    """Mode (auto or required) and functions of a tool_choice that allows some of the functions."""
    tools = choice.get("tools") if isinstance(choice, Mapping) else None
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, Mapping) for tool in tools):
        raise ApiError("tool_choice allows no tools: list some of them by name", param="tool_choice")
    mode = choice.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise ApiError(f"the mode of tool_choice is {shown(mode)}: give auto or required", param="tool_choice")
    names = [named_in(tool, functions) for tool in tools]
    return mode, [function for function in functions if function.name in names]


def function_of(tool: Any, number: int) -> Function:
    """The function of a tool, in the format of chat completions or of responses; `number` is its index in errors."""
    function = tool.get("function", tool) if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ApiError(
            f"tools[{number}] is not a function with a name: write type, function and its name",
            param=f"tools[{number}]",
        )
    parameters = function.get("parameters")
    if not isinstance(parameters or {}, dict):
        message = f"the parameters of tools[{number}] are not a JSON schema: give an object"
        raise ApiError(message, param=f"tools[{number}]")
    kind = (parameters or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ApiError(
            f"Cannot use tools[{number}], whose parameters have the type {shown(kind)}: give the type object",
            param=f"tools[{number}]",
        )
    given = {key: value for key, value in function.items() if key in ("name", "description", "parameters", "strict")}
    return Function(given, f"tools[{number}]")
