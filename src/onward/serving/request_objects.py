"""The objects inside a request: messages' contents, calls, tools and formats, with the fields that the server knows.

Further fields are kept, for chat templates, and named once in the log.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, with_config
from typing_extensions import TypedDict

from onward.serving.shapes import Words

OPEN = ConfigDict(extra="allow")
TEXTS = "text", "input_text", "output_text", "reasoning_text", "summary_text"  # types of content parts with a text


def is_text(kind: str) -> str:
    if kind not in TEXTS:
        raise ValueError("this model reads text only")
    return kind


def hold_table(arguments: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(arguments, str) and not isinstance(json.loads(arguments or "null"), dict | None):
        raise ValueError("not an object")
    return arguments


TextType = Annotated[str, AfterValidator(is_text), Words('"text", because this model reads text only')]
Arguments = Annotated[
    str | dict[str, Any] | None, AfterValidator(hold_table), Words("an object, or a text that is its JSON")
]


@with_config(OPEN)
class ContentPart(TypedDict, total=False):
    """A part of a message's content."""

    type: TextType
    text: str | None
    annotations: list[Any] | None
    logprobs: list[Any] | None
    prompt_cache_breakpoint: dict[str, Any] | None


class Named(TypedDict):
    """An object with a name."""

    name: str


@with_config(OPEN)
class Called(Named, total=False):
    """The function of a call, and its arguments as JSON."""

    arguments: Arguments


class Calling(TypedDict):
    """An object with the function of a call."""

    function: Called


@with_config(OPEN)
class Call(Calling, total=False):
    """A call of a tool in a message of the assistant."""

    id: str | None
    type: str | None
    index: int | None


@with_config(OPEN)
class FunctionSpec(TypedDict, total=False):
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


@with_config(OPEN)
class Tool(FunctionSpec, total=False):
    """A tool: its function, or the fields of the function as /v1/responses has them."""

    type: str
    function: FunctionSpec


@with_config(OPEN)
class AnswerSchema(TypedDict, total=False):
    """The JSON schema of an answer, with its name."""

    name: str | None
    description: str | None
    schema: dict[str, Any] | None
    strict: bool | None


@with_config(OPEN)
class ResponseFormat(TypedDict, total=False):
    """The format of an answer in chat completions; `schema` is that of json_object, as llama.cpp has it."""

    type: str
    json_schema: AnswerSchema | None
    schema: dict[str, Any] | None


@with_config(OPEN)
class TextFormat(AnswerSchema, total=False):
    """The format of an answer in responses."""

    type: str


@with_config(OPEN)
class TextField(TypedDict, total=False):
    """The field text of responses."""

    format: TextFormat | None
    verbosity: str | None


@with_config(OPEN)
class Reasoning(TypedDict, total=False):
    """The field reasoning of responses."""

    effort: str | None
    summary: str | None
    generate_summary: str | None


@with_config(OPEN)
class InputItem(TypedDict, total=False):
    """An item of the input of responses: a message, a call, its output, or reasoning."""

    type: str | None
    role: str
    content: str | list[ContentPart] | None
    id: str | None
    status: str | None
    phase: str | None
    call_id: str | None
    name: str | None
    arguments: Arguments
    output: str | list[ContentPart] | None
    summary: list[Any] | None
    encrypted_content: str | None
