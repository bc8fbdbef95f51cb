"""The tools of a travel agent that answers in three steps, for the clients in this folder."""

from typing import Any

ASK: list[dict[str, Any]] = [{"role": "user", "content": "Where shall I go?"}]


def called(name: str, arguments: dict[str, Any]) -> str:
    """The result of a tool."""
    return f"{name}: {', '.join(f'{key}={value}' for key, value in sorted(arguments.items()))}"


def tool(name: str, **properties: str) -> dict[str, Any]:
    """A tool whose arguments are all required, in the format of chat completions."""
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema | {"required": [*properties]}}}


TOOLS = [tool("cities", country="string"), tool("weather", city="string", days="integer"), tool("book", city="string")]
