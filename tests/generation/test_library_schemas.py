"""Answers conform to schemas as pydantic, zod, LangChain, instructor and OpenAPI write them."""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections import deque
from random import Random
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import jsonschema
import pydantic
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from onward.generation.schemas import prepared

from support.schemas import problems, random_answer


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str = ""


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Sum(BaseModel):
    kind: Literal["sum"] = "sum"
    left: "Term"
    right: "Term"


class Number(BaseModel):
    kind: Literal["number"] = "number"
    value: float


Term = Annotated[Sum | Number, Field(discriminator="kind")]
Sum.model_rebuild()


class Point(NamedTuple):
    x: int
    y: str = "a"


class Options(TypedDict, total=False):
    depth: int
    colors: list[Color]


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T] = Field(max_length=2)
    next: "Page[T] | None" = None


def named(name: str, **fields: Any) -> type[BaseModel]:
    return pydantic.create_model(name, **fields)


class Twice(BaseModel):
    """Two different models with the same name; pydantic gives them different names in $defs."""

    first: named("Part", a=(int, ...))  # type: ignore[valid-type]
    second: named("Part", b=(Color, ...))  # type: ignore[valid-type]


class Strict(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    when: datetime.datetime | None = None
    tags: set[Color] = Field(default=set(), description="colors", examples=[["red"]])
    price: decimal.Decimal = Field(gt=0, deprecated=True)
    pet: Cat | Dog = Field(discriminator="kind")


TYPES: list[Any] = [
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, pydantic.PastDate, pydantic.AwareDatetime),
    *(decimal.Decimal, Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)], uuid.UUID, pydantic.UUID4),
    *(
        Color,
        Level,
        Literal["a", 1, None, True],
        int | None,
        int | str,
        Annotated[Cat | Dog, Field(discriminator="kind")],
    ),
    *(set[int], frozenset[str], set[Color], tuple[int, str], tuple[int, ...], deque[int], list[Any], list[list[int]]),
    *(dict[str, int], dict[int, str], dict[Color, int], dict[uuid.UUID, int], dict[datetime.date, int]),
    *(dict[Annotated[str, Field(min_length=2)], int], dict[Annotated[str, Field(pattern="^a")], int]),
    *(Annotated[str, Field(pattern=r"^\d{3}$")], Annotated[str, Field(min_length=2, max_length=3)]),
    *(pydantic.HttpUrl, pydantic.AnyUrl, pydantic.PostgresDsn, ipaddress.IPv4Address, ipaddress.IPv6Network),
    *(bytes, pydantic.Base64Bytes, pathlib.Path, pydantic.SecretStr, pydantic.Json[list[int]], pydantic.ByteSize),
    *(Tree, Term, Sum, Point, Options, Page[Color], Twice, Strict, Any, None, bool, float, complex, re.Pattern),
    *(
        pydantic.conint(gt=0, multiple_of=3),
        pydantic.confloat(multiple_of=0.5, le=10),
        pydantic.conset(int, min_length=1),
    ),
    *(pydantic.conlist(int, min_length=1, max_length=3), pydantic.NegativeInt, pydantic.FiniteFloat),
]
ZOD: dict[str, Any] = {  # JSON schemas of zod's types
    "email": {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    },
    "hostname": {
        "type": "string",
        "format": "hostname",
        "pattern": r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9]{1,62})*\.?$",
    },
    "duration": {
        "type": "string",
        "format": "duration",
        "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
    },
    "datetime": {
        "type": "string",
        "format": "date-time",
        "pattern": r"^\d{4}-0[1-9]-[12]\dT[01]\d:[0-5]\d(:[0-5]\d)?Z$",
    },
    "local time": {"type": "string", "format": "time", "pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d$"},
    "base64": {
        "type": "string",
        "format": "base64",
        "contentEncoding": "base64",
        "pattern": r"^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$",
    },
    "e164": {"type": "string", "format": "e164", "pattern": r"^\+[1-9]\d{6,14}$"},
    "jwt": {"type": "string", "format": "jwt"},
    "starts and ends": {"type": "string", "format": "ends_with", "allOf": [{"pattern": "^ab.*"}, {"pattern": ".*c$"}]},
    "float32": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    "optional never": {"type": "object", "properties": {"a": {"not": {}}}, "additionalProperties": False},
    "record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "record of an enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "number"},
        "required": ["a", "b"],
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "boolean"}, "minItems": 1},
    "union": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"type": "string", "const": "a"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"type": "string", "const": "b"}}, "required": ["k"]},
        ]
    },
    "json": {
        "anyOf": [
            *({"type": kind} for kind in ("string", "number", "boolean", "null")),
            {"type": "array", "items": {"$ref": "#"}},
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"$ref": "#"}},
        ]
    },
}
OTHERS: dict[str, Any] = {
    "a tool of LangChain": {
        "description": "Search.",
        "title": "search",
        "type": "object",
        "properties": {
            "query": {"description": "text", "type": "string"},
            "limit": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": None},
            "order": {"allOf": [{"$ref": "#/definitions/Order"}], "default": "up", "title": "Order"},
        },
        "required": ["query"],
        "definitions": {"Order": {"enum": ["up", "down"], "title": "Order", "type": "string"}},
    },
    "a model of instructor": {
        "$defs": {"Fact": {"properties": {"text": {"type": "string"}}, "required": ["text"], "type": "object"}},
        "properties": {"facts": {"items": {"$ref": "#/$defs/Fact"}, "maxItems": 2, "type": "array"}},
        "required": ["facts"],
        "type": "object",
        "additionalProperties": False,
    },
}
OPENAPI: dict[str, tuple[Any, Any]] = {  # a schema in OpenAPI 3.0, and its equivalent in JSON Schema
    "null": ({"type": "string", "nullable": True, "maxLength": 3}, {"type": ["string", "null"], "maxLength": 3}),
    "null of a reference": (
        {"allOf": [{"$ref": "#/definitions/A"}], "nullable": True, "definitions": {"A": {"type": "integer"}}},
        {"type": ["integer", "null"]},
    ),
    "bounds": (
        {"type": "integer", "format": "int32", "minimum": 1, "exclusiveMinimum": True, "maximum": 4, "example": 2},
        {"type": "integer", "exclusiveMinimum": 1, "maximum": 4},
    ),
    "a tuple of draft 7": (
        {"type": "array", "items": [{"type": "integer"}, {"const": "a"}], "additionalItems": False, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "a"}], "items": False, "minItems": 1},
    ),
    "dependencies of draft 7": (
        {
            "required": ["a"],
            "properties": {"a": {}, "b": {}},
            "dependencies": {"a": ["b"]},
            "additionalProperties": False,
        },
        {
            "required": ["a"],
            "properties": {"a": {}, "b": {}},
            "dependentRequired": {"a": ["b"]},
            "additionalProperties": False,
        },
    ),
}


def assert_answers_conform(schema: Any, same: Any) -> None:
    """Assert that random answers under `schema` conform to `same`, its equivalent in draft 2020-12, unless the check of
    complete answers names the violated part."""
    random, ready, conforming = Random(0), prepared(schema), 0
    validator = jsonschema.Draft202012Validator(same)
    for _ in range(6):
        answer = random_answer(schema, random, 700)
        if answer is not None:
            found = problems(ready, answer)
            assert validator.is_valid(json.loads(answer)) != bool(found), (answer, found)
            conforming += not found
    assert conforming


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_answers_conform_to_schemas_of_pydantic(kind: Any, mode: Literal["validation", "serialization"]) -> None:
    schema = pydantic.TypeAdapter(kind).json_schema(mode=mode)
    assert_answers_conform(schema, schema)


@pytest.mark.parametrize("kind", [Term, dict[Color, int], dict[uuid.UUID, int], Page[Color], Level, Twice], ids=str)
def test_pydantic_reads_the_answers(kind: Any) -> None:
    adapter, random = pydantic.TypeAdapter(kind), Random(1)
    answers = [random_answer(adapter.json_schema(), random, 700) for _ in range(8)]
    read = [adapter.validate_json(answer) for answer in answers if answer]
    assert read


@pytest.mark.parametrize("name", ZOD)
def test_answers_conform_to_schemas_of_zod(name: str) -> None:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | ZOD[name]
    assert_answers_conform(schema, schema)


@pytest.mark.parametrize("name", OTHERS)
def test_answers_conform_to_schemas_of_agents(name: str) -> None:
    assert_answers_conform(OTHERS[name], OTHERS[name])


@pytest.mark.parametrize("name", OPENAPI)
def test_older_drafts_and_openapi_mean_the_same(name: str) -> None:
    assert_answers_conform(*OPENAPI[name])
