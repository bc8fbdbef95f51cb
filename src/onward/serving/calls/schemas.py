"""The functions of tools, and the JSON schemas of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onward.generation.schema_rule import rule
from onward.generation.schemas import Prepared, prepared

TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


@dataclass(frozen=True)
class Function:
    """A function as the request gives it and as chat templates read it; `field` names it in errors."""

    given: Mapping[str, Any]
    field: str = "tools"

    @property
    def name(self) -> str:
        name: str = self.given["name"]
        return name

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments, which are always an object."""
        return {**(self.given.get("parameters") or {}), "type": "object"}

    @property
    def arguments(self) -> Prepared:
        return prepared(self.parameters, f"{self.field}.parameters")


def arguments_rule(function: Function, number: int) -> str:
    return f"arguments_{number}: {rule(function.arguments.schema)}\n"


def calls_schema(functions: Sequence[Function], key: str) -> dict[str, Any]:
    """JSON schema of a call with a name and, under `key`, arguments. The schema of each function's arguments becomes a
    definition; references to the schema's root then refer to this definition."""
    calls, definitions = [], {}
    for number, function in enumerate(functions):
        definitions[f"arguments_{number}"] = moved(function.arguments.schema, f"arguments_{number}")
        properties = {"name": {"const": function.name}, key: {"$ref": f"#/$defs/arguments_{number}"}}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        )
    return {"anyOf": calls, "$defs": definitions}


def moved(value: Any, name: str) -> Any:
    # references to the root refer to the definition with this name
    if isinstance(value, Mapping):
        return {
            key: f"#/$defs/{name}{inner[1:]}" if key == "$ref" and str(inner).startswith("#") else moved(inner, name)
            for key, inner in value.items()
        }
    return [moved(inner, name) for inner in value] if isinstance(value, list) else value


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, or the schema in `root` to which its `$ref` points; {} if it is not a schema."""
    for _ in range(8):  # references to references
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        found: Any = root
        for part in schema["$ref"].removeprefix("#").split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        schema = found
    return dict(schema) if isinstance(schema, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 8) -> set[str]:
    """Types of the values that a schema allows; an empty set if it does not restrict them."""
    schema = resolved(schema, root)
    if isinstance(kind := schema.get("type"), str | list):
        return {kind} if isinstance(kind, str) else {one for one in kind if isinstance(one, str)}
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema[one] for one in ("const",) if one in schema]
    )
    if values:
        return {TYPES.get(type(value), "null") for value in values}
    options = [one for name in ("anyOf", "oneOf", "allOf") for one in schema.get(name) or () if depth]
    kinds = [types_of(one, root, depth - 1) for one in options]
    return set[str]().union(*kinds) if all(kinds) else set()
