"""The shapes in which data sets come: ShareGPT, Alpaca, OpenAI messages and others, as the records that forms read.

A record has `messages`; `prompt` and `completion`; `chosen` and `rejected`, perhaps with a `prompt`; or `text`.
Messages are lists of {"role": ..., "content": ...} with texts as contents. Fields that no shape names are kept."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from onward.arguments import shown
from onward.data.columns import renaming
from onward.data.records import Record, read_records
from onward.errors import UserError
from onward.suggestions import nearest

Values = Mapping[str, Any]
ROLES = {  # of ShareGPT and its relatives
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
MEDIA = "images", "image", "audio", "audios", "videos", "video"  # columns that are refused unless they are empty
TALKS = "messages", "prompt", "completion", "chosen", "rejected"  # fields that may hold messages


@dataclass(frozen=True)
class Shape:
    """A layout in which data sets publish their rows, such as ShareGPT: the fields by which it is recognized, and how a
    row becomes a record for fine-tuning."""

    name: str
    fields: tuple[str, ...]
    convert: Callable[[dict[str, Any]], Values] = lambda values: values  # converts the fields of a row in this shape


def message(value: Any, role: str = "") -> dict[str, Any]:
    """Make a message {"role", "content"} from a table {from, value} or {role, content}, or from a text with a role.
    Raises a UserError for any other value, and for an unknown role."""
    if isinstance(value, str) and role:
        return {"role": role, "content": value}
    if not isinstance(value, Mapping) or not ({"from", "value"} <= value.keys() or "role" in value):
        raise UserError(f"a turn is {shown(value)}: write it as {{'from': 'human', 'value': 'text'}}")
    if "from" not in value:
        return dict(value)
    if not isinstance(value["from"], str) or value["from"] not in ROLES:
        raise UserError(f"a turn is from {shown(value['from'])}: {nearest(str(value['from']), ROLES)}")
    return {"role": ROLES[value["from"]], "content": value["value"]}


def system_message(text: Any) -> list[dict[str, Any]]:
    """Return a system prompt as a list of one message; the list is empty if there is no text."""
    return [message(text, "system")] if text else []


def sharegpt(values: dict[str, Any]) -> Values:
    """Convert a ShareGPT row (`values`) with `conversations`, perhaps with `system`, with `chosen` and `rejected`, or
    with a `kto_tag`, to the fields of a record. Raises a UserError for malformed turns."""
    turns, system = values.pop("conversations"), values.pop("system", None)
    if not isinstance(turns, list | tuple) or not turns:
        raise UserError(f"conversations are {shown(turns)}: write a list of {{'from': 'human', 'value': 'text'}}")
    talk = [*system_message(system), *map(message, turns)]
    if {"chosen", "rejected"} <= values.keys():
        answers = {name: [message(values[name], "assistant")] for name in ("chosen", "rejected")}
        return {**values, "prompt": talk, **answers}
    if "kto_tag" in values:
        label = values.pop("kto_tag")
        return {**values, "prompt": talk[:-1], "completion": talk[-1:], "label": label}
    return {**values, "messages": talk}


def alpaca(values: dict[str, Any]) -> Values:
    """Convert an Alpaca row (`values`) with `instruction` and `input`, with `output` or with `chosen` and `rejected`,
    perhaps with `system` and `history`, a list of earlier (instruction, answer), to the fields of a record. Raises a
    UserError for a malformed history."""
    system, earlier = values.pop("system", None), values.pop("history", None) or []
    parts = [values.pop(name, None) for name in ("instruction", "input")]
    if wrong := next((part for part in parts if not isinstance(part, str | None)), None):
        raise UserError(f"instruction or input is {shown(wrong)}: give a text")
    talk = system_message(system)
    for pair in earlier:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UserError(f"history has {shown(pair)}: write pairs of an instruction and its answer")
        talk += [message(pair[0], "user"), message(pair[1], "assistant")]
    talk.append(message("\n\n".join(part for part in parts if part), "user"))
    if "output" in values:
        talk.append(message(values.pop("output"), "assistant"))
        return {**values, "messages": talk}
    return {**values, "prompt": talk, **{n: [message(values[n], "assistant")] for n in ("chosen", "rejected")}}


def implicit(values: dict[str, Any]) -> Values:
    """Convert a row (`values`) with the texts `chosen` and `rejected` but no prompt to the fields of a record: the
    prompt is the common beginning of both texts."""
    chosen, rejected = values["chosen"], values["rejected"]
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return values
    same = (one == other for one, other in zip(chosen, rejected))
    size = next((i for i, equal in enumerate(same) if not equal), min(len(chosen), len(rejected)))
    size -= size > 0 and chosen[size - 1] == " "  # a space belongs to the answers
    return {**values, "prompt": chosen[:size], "chosen": chosen[size:], "rejected": rejected[size:]}


SHAPES = (  # the first whose fields a row has
    Shape("ShareGPT preferences", ("conversations", "chosen", "rejected"), sharegpt),
    Shape("ShareGPT conversations", ("conversations",), sharegpt),
    Shape("Alpaca preferences", ("instruction", "chosen", "rejected"), alpaca),
    Shape("Alpaca instructions", ("instruction", "output"), alpaca),
    Shape("messages", ("messages",)),
    Shape("preferences", ("prompt", "chosen", "rejected")),
    Shape("preferences without prompts", ("chosen", "rejected"), implicit),
    Shape("labeled completions", ("completion", "label")),
    Shape("prompts and completions", ("prompt", "completion")),
    Shape("prompts", ("prompt",)),
    Shape("labeled texts", ("text", "label")),
    Shape("texts", ("text",)),
)


def shape_of(values: Values) -> Shape | None:
    """Return the layout of a row (`values`), such as ShareGPT; None if it is unknown."""
    present = {name for name, value in values.items() if value is not None}
    return next((shape for shape in SHAPES if present.issuperset(shape.fields)), None)


def converted(record: Record) -> Record:
    """Convert a row of a known layout, such as ShareGPT, to a record with the fields that fine-tuning reads; a row of
    an unknown layout is returned unchanged. Raises a UserError that names the row if it is malformed."""
    shape = shape_of(record.values)
    if shape is None:
        return record  # the form of the method says what it needs
    try:
        values = dict(shape.convert(dict(record.values)))
        if isinstance(values.get("tools"), str):
            with suppress(ValueError, RecursionError):  # as in ShareGPT; another text is refused where it is read
                values["tools"] = json.loads(values["tools"] or "null")
        for name in MEDIA:
            if values.get(name):
                raise UserError(f"it has {name}, and Onward trains on text: remove the field, or the record")
        for name in TALKS:
            if isinstance(values.get(name), list | tuple):
                values[name] = [text_message(one, i) for i, one in enumerate(values[name], 1)]
    except UserError as error:
        raise UserError(f"{record.place}: {error}") from None
    return Record(values, record.place)


def text_message(value: Any, number: int) -> Any:
    """Return a message whose content, if it is a list of parts, is joined to one text. Raises a UserError for a part
    that is not text, such as an image; `number` is the number of the message, for errors."""
    content = value.get("content") if isinstance(value, Mapping) else None
    if not isinstance(content, list | tuple):
        return value
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"message {number} has a part of type {shown(kind)}, and Onward trains on text: remove the record"
            )
        texts.append(part["text"])
    return {**value, "content": "".join(texts)}


def renamed(record: Record, columns: Mapping[str, str]) -> Record:
    """Return a row with its columns renamed, by {Onward's name: name in the data}. Raises a UserError if a column is
    missing."""
    for theirs in columns.values():
        if theirs not in record.values:
            raise UserError(f"{record.place}: it has no column {theirs!r}: {nearest(theirs, record.values)}")
    kept = {name: value for name, value in record.values.items() if name not in columns.values()}
    return Record({**kept, **{name: record.values[theirs] for name, theirs in columns.items()}}, record.place)


class Records:
    """The records of data sources for fine-tuning, converted from known layouts such as ShareGPT; `columns` renames
    fields as `renaming` parses it.

    After reading, `counts` has for each source the names of the layouts and the number of their rows.
    """

    def __init__(self, sources: Sequence[str], columns: str = "") -> None:
        self.sources, self.columns = sources, renaming(columns)
        self.counts: dict[str, dict[str, int]] = {}

    def __iter__(self) -> Iterator[Record]:
        for source in self.sources:
            counts = self.counts[source] = {}
            for row in read_records(source):
                record = renamed(row, self.columns) if self.columns else row
                shape = shape_of(record.values)
                name = shape.name if shape else "rows of an unknown shape"
                counts[name] = counts.get(name, 0) + 1
                yield converted(record)

    def sentences(self) -> list[str]:
        """Return a line for each source that was read: the names of its layouts, and the number of rows of each."""
        shapes = {s: ", ".join(f"{count:,} {name}" for name, count in c.items()) for s, c in self.counts.items()}
        return [f"{source}: {description}" for source, description in shapes.items()]
