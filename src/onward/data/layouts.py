"""Convert rows in the layouts of published data sets (ShareGPT, Alpaca, OpenAI messages and others) to the records that
forms read.

A record has `messages`; a `prompt`, perhaps with a `completion`; `chosen` and `rejected`, perhaps with a `prompt`; or a
`text`. Completions and texts may have a `label`. Messages are lists of {"role": ..., "content": ...} with texts as
contents. Fields that are not part of the layout are kept."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from onward.base.arguments import shown
from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.data.columns import renaming, value_at, without
from onward.data.messages import TALKS, message, read_messages, with_system
from onward.data.records import Record, read_records

Values = Mapping[str, Any]
MEDIA = "images", "image", "audio", "audios", "videos", "video"  # columns that raise an error unless they are empty
QUESTIONS = "instruction", "question", "query", "input"  # columns whose texts are joined into one question


@dataclass(frozen=True)
class Layout:
    """A layout in which data sets publish their rows, recognized by its fields."""

    name: str
    fields: tuple[str, ...]
    convert: Callable[[dict[str, Any]], Values] = lambda values: values  # converts a row of this layout


def sharegpt(values: dict[str, Any]) -> Values:
    """Convert `conversations`, perhaps with `chosen` and `rejected`, or with a `kto_tag`."""
    turns = values.pop("conversations")
    if not isinstance(turns, list | tuple) or not turns:
        raise UserError(f"conversations are {shown(turns)}: write a list of {{'from': 'human', 'value': 'text'}}")
    talk = [*map(message, turns)]
    if {"chosen", "rejected"} <= values.keys():
        answers = {name: [message(values[name], "assistant")] for name in ("chosen", "rejected")}
        return {**values, "prompt": talk, **answers}
    if "kto_tag" in values:
        label = values.pop("kto_tag")
        return {**values, "prompt": talk[:-1], "completion": talk[-1:], "label": label}
    return {**values, "messages": talk}


def asked(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Remove the columns of QUESTIONS and `history`, a list of earlier (instruction, answer) pairs, from a row; return
    them as messages."""
    parts = {name: values.pop(name, None) for name in QUESTIONS}
    if wrong := [name for name, part in parts.items() if not isinstance(part, str | None)]:
        raise UserError(f"{wrong[0]} is {shown(parts[wrong[0]])}: give a text")
    talk = list[dict[str, Any]]()
    for pair in values.pop("history", None) or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UserError(f"history has {shown(pair)}: write pairs of an instruction and its answer")
        talk += [message(pair[0], "user"), message(pair[1], "assistant")]
    return [*talk, message("\n\n".join(part for part in parts.values() if part), "user")]


def alpaca(values: dict[str, Any]) -> Values:
    talk = [*asked(values), message(values.pop("output"), "assistant")]
    return {**values, "messages": talk}


def asked_pair(values: dict[str, Any]) -> Values:
    """Convert a question, such as Alpaca's `instruction`, and its answers `chosen` and `rejected`."""
    if isinstance(values["chosen"], list) and shared_start(values["chosen"], values["rejected"]):
        return values  # whole conversations, which contain the question
    talk = asked(values)
    return {**values, "prompt": talk, **{name: answer_messages(values[name]) for name in ("chosen", "rejected")}}


def prompted_pair(values: dict[str, Any]) -> Values:
    """Convert a text `prompt` to a message if the answers are lists of messages without a common prefix."""
    prompt, chosen, rejected = (values[name] for name in ("prompt", "chosen", "rejected"))
    messages = isinstance(chosen, list) and isinstance(rejected, list)
    if isinstance(prompt, str) and prompt and messages and not shared_start(chosen, rejected):
        return {**values, "prompt": [message(prompt, "user")]}
    return values


def answer_messages(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [message(value, "assistant")]


def shared_start(one: Any, other: Any) -> bool:
    return bool(one) and isinstance(other, list) and one[:1] == other[:1]


def implicit(values: dict[str, Any]) -> Values:
    """Split the common prefix of the texts `chosen` and `rejected` off as the prompt."""
    chosen, rejected = values["chosen"], values["rejected"]
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return values
    same = (one == other for one, other in zip(chosen, rejected))
    size = next((i for i, equal in enumerate(same) if not equal), min(len(chosen), len(rejected)))
    size -= size > 0 and chosen[size - 1] == " "  # a space at the end of the prefix belongs to the answers
    return {**values, "prompt": chosen[:size], "chosen": chosen[size:], "rejected": rejected[size:]}


LAYOUTS = (  # a row has the first layout whose fields it contains
    Layout("ShareGPT preferences", ("conversations", "chosen", "rejected"), sharegpt),
    Layout("ShareGPT conversations", ("conversations",), sharegpt),
    Layout("Alpaca instructions", ("instruction", "output"), alpaca),
    Layout("messages", ("messages",)),
    Layout("preferences", ("prompt", "chosen", "rejected"), prompted_pair),
    Layout("Alpaca preferences", ("instruction", "chosen", "rejected"), asked_pair),
    *(Layout("preferences after questions", (name, "chosen", "rejected"), asked_pair) for name in QUESTIONS[1:]),
    Layout("preferences without prompts", ("chosen", "rejected"), implicit),
    Layout("labeled completions", ("completion", "label")),
    Layout("prompts and completions", ("prompt", "completion")),
    Layout("prompts", ("prompt",)),
    Layout("labeled texts", ("text", "label")),
    Layout("texts", ("text",)),
)


def layout_of(values: Values) -> Layout | None:
    present = {name for name, value in values.items() if value is not None}
    return next((layout for layout in LAYOUTS if present.issuperset(layout.fields)), None)


def converted(record: Record) -> Record:
    """Convert a row of a known layout to a record that fine-tuning reads; return other rows unchanged."""
    layout = layout_of(record.values)
    if layout is None:
        return record  # the method's form reports missing fields
    try:
        values = dict(layout.convert(dict(record.values)))
        if isinstance(values.get("tools"), str):
            with suppress(ValueError, RecursionError):  # JSON text, as in ShareGPT; other text raises an error later
                values["tools"] = json.loads(values["tools"] or "null")
        if isinstance(values.get("functions"), list | tuple) and not values.get("tools"):  # OpenAI's former name
            values["tools"] = [{"type": "function", "function": one} for one in values.pop("functions")]
        for name in MEDIA:
            if values.get(name):
                raise UserError(
                    f"cannot train on its {name}, because Onward trains on text: remove the field, or the record"
                )
        for name in TALKS:
            if isinstance(values.get(name), list | tuple):
                values[name] = read_messages(values[name])
        values = with_system(values)
    except UserError as error:
        raise UserError(f"{record.place}: {error}") from None
    return replace(record, values=values)


def renamed(record: Record, columns: Mapping[str, str]) -> Record:
    """Rename columns of a row; `columns` is {Onward's name: name in the data, perhaps a path}."""
    kept, named = dict(record.values), dict[str, Any]()
    for ours, theirs in columns.items():
        try:
            named[ours] = value_at(record.values, theirs)
        except KeyError:
            raise UserError(f"{record.place}: it has no column {theirs!r}: {nearest(theirs, record.values)}") from None
        kept = without(kept, theirs)
    return replace(record, values={**kept, **named})


class Records:
    """The records of data sources; `columns` renames fields as `renaming` parses it, `ignore` names columns to leave
    out. After reading, `counts` has the number of rows of each layout, by source."""

    def __init__(self, sources: Sequence[str], columns: str = "", ignore: str = "") -> None:
        self.sources, self.columns = sources, renaming(columns)
        self.ignore = {name.strip() for name in ignore.split(",") if name.strip()}
        self.counts: dict[str, dict[str, int]] = {}

    def __iter__(self) -> Iterator[Record]:
        for source in self.sources:
            counts = self.counts[source] = {}
            for row in read_records(source):
                record = renamed(row, self.columns) if self.columns else row
                kept = {name: value for name, value in record.values.items() if name not in self.ignore}
                record = Record(kept, record.place, source)
                layout = layout_of(record.values)
                name = layout.name if layout else "rows of an unknown layout"
                counts[name] = counts.get(name, 0) + 1
                yield converted(record)

    def sentences(self) -> list[str]:
        layouts = {s: ", ".join(f"{count:,} {name}" for name, count in c.items()) for s, c in self.counts.items()}
        return [f"{source}: {description}" for source, description in layouts.items()]
