"""The types of a request's fields: functions that find the first mismatch of a request, and fields that the types lack.

A type is an annotation that pydantic reads. A class of fields is a model of pydantic, or a TypedDict.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict

LOOKED_AT = 4096  # largest number of parts of a value that are searched for unknown fields
SHOWN = 80  # largest number of characters of a value in a message
MISSING = object()  # the value of a required field that a request lacks
WORDS: dict[Any, tuple[str, str]] = {  # words for a type, in the singular and the plural
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    bool: ("true or false", "true or false"),
    dict: ("an object", "objects"),
    Any: ("any value", "any values"),
}


class Words(str):
    """Words for a type in messages: `Annotated[str, Words("a date")]`."""


def not_bool(value: Any) -> Any:
    if isinstance(value, bool):  # Python treats True and False as 1 and 0
        raise ValueError("true and false are not numbers")
    return value


Whole = Annotated[int, BeforeValidator(not_bool)]
Real = Annotated[float, BeforeValidator(not_bool)]
TokenId = Annotated[int, Field(strict=True)]  # checked without a call of Python, unlike Whole
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]  # one mistake is enough: a list may have a million items
Texts = Annotated[list[str], Field(fail_fast=True)]
Filled = Annotated[str, Field(min_length=1)]  # a limit must be in the type: messages are made from types
Prompts = str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]


def mistake(kind: Any, value: Any, path: str = "") -> tuple[str, str] | None:
    """The path of the first part of a JSON value that does not match its type, and the mistake, such as
    ("messages[2].content", "is 5: it must be a text or a list of objects"). Where several types are possible, the parts
    of the value are not named."""
    if value is MISSING:
        return path, "is missing: give it"
    if accepts(kind, value):
        return None
    possible = [one for one in alternatives(kind) if is_container(one, value)]
    for inner, part, name in parts(possible[0], value) if len(possible) == 1 else ():
        if found := mistake(inner, part, (path + name).lstrip(".")):
            return found
    return path, f"is {shown(value)}: it must be {expected(kind)}"


def unknown(kind: Any, value: Any, path: str) -> Iterator[str]:
    """Paths, such as `messages[].color`, of the fields inside a value that its type lacks and that are not null."""
    for one in alternatives(kind):
        if is_container(one, value) and holds_fields(one):
            if fields := fields_of(one):
                yield from (f"{path}.{name}" for name in value if name not in fields and value[name] is not None)
            for inner, part, name in islice(parts(one, value), LOOKED_AT):
                yield from unknown(inner, part, path + ("[]" if name.startswith("[") else name))


def parts(kind: Any, value: Any) -> Iterator[tuple[Any, Any, str]]:
    """(type, value, name) for each part: declared fields by `.name`, where a required one may be MISSING, or items by
    `[index]` or `["key"]`."""
    args = get_args(bare(kind))
    if (fields := fields_of(kind)) is not None:
        for name, (inner, required) in fields.items():
            if required or name in value:
                yield inner, value.get(name, MISSING), f".{name}"
    elif isinstance(value, Mapping):
        yield from ((args[1], part, f"[{shown(name)}]") for name, part in value.items() if args)
    else:
        inner_types = args if get_origin(bare(kind)) is tuple else args * len(value)
        yield from ((inner, part, f"[{index}]") for index, (inner, part) in enumerate(zip(inner_types, value)))


def bare(kind: Any) -> Any:
    """A type without its annotations."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def fields_of(kind: Any) -> dict[str, tuple[Any, bool]] | None:
    """{field: (type, whether the field is required)} of a TypedDict or pydantic model; None for any other type."""
    plain = bare(kind)
    return declared(plain) if isinstance(plain, type) else None


@cache
def declared(kind: type) -> dict[str, tuple[Any, bool]] | None:
    if is_typeddict(kind):
        required = kind.__required_keys__  # type: ignore[attr-defined]
        return {name: (hint, name in required) for name, hint in get_type_hints(kind, include_extras=True).items()}
    if not issubclass(kind, BaseModel):
        return None
    hints = get_type_hints(kind, include_extras=True)
    return {field.alias or name: (hints[name], field.is_required()) for name, field in kind.model_fields.items()}


def holds_fields(kind: Any) -> bool:
    """Whether a type is or contains a TypedDict or pydantic model."""
    return fields_of(kind) is not None or any(map(holds_fields, get_args(bare(kind))))


def alternatives(kind: Any) -> list[Any]:
    """The types of a union except null, or the type itself."""
    if get_origin(bare(kind)) in (Union, UnionType):
        return [one for inner in get_args(bare(kind)) for one in alternatives(inner) if one is not NoneType]
    return [kind]


def accepts(kind: Any, value: Any) -> bool:
    """Whether pydantic reads a JSON value as this type."""
    try:
        reader(kind).validate_python(value)
    except ValidationError:
        return False
    return True


@cache  # making a reader takes up to a millisecond
def reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def is_container(kind: Any, value: Any) -> bool:
    """Whether value and type are both objects, or both lists."""
    plain = get_origin(bare(kind)) or bare(kind)
    if isinstance(value, Mapping):
        return plain is dict or fields_of(kind) is not None
    return isinstance(value, list) and plain in (list, tuple)


def expected(kind: Any, number: int = 0) -> str:
    """A type in words: "a text or a list of texts"; `number` 1 for several values."""
    for one in getattr(kind, "__metadata__", ()):
        if isinstance(one, Words):
            return one
    *others, last = dict.fromkeys(described(one, number) for one in alternatives(kind))
    return f"{', '.join(others)} or {last}" if others else last


def described(kind: Any, number: int) -> str:
    plain, args = bare(kind), get_args(bare(kind))
    origin = get_origin(plain) or plain
    if origin is Literal:
        return " or ".join(map(shown, args))
    if origin in (list, tuple):
        length = f"{len(args)} " if origin is tuple else ""
        words = f"{('a list', 'lists')[number]} of {length}{expected(args[0], 1)}"
    else:
        words = WORDS[dict if fields_of(kind) is not None else origin][number]
    limits = {
        name: getattr(limit, name)
        for one in getattr(kind, "__metadata__", ())
        for limit in (one.metadata if isinstance(one, FieldInfo) else ())
        for name in ("ge", "le", "min_length", "max_length")
        if hasattr(limit, name)
    }
    if "le" in limits:
        words += f" from {limits['ge']} to {limits['le']}"
    if "max_length" not in limits and "min_length" in limits:
        words += " that is not empty"
    elif "max_length" in limits:
        least, most = limits.get("min_length", 0), f"{limits['max_length']:,}"
        words += f" with at most {most} items" if origin is dict else f", {least} to {most} of them"
    return words


def shown(value: Any) -> str:
    """JSON in one line, cut after SHOWN characters."""
    try:
        text = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
