"""Forms of examples: each fine-tuning method builds examples of one form from records."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from onward.base.arguments import shown
from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.data.examples import Encoder, Example, TokenSequence, check_text
from onward.data.records import Record
from onward.data.unread import check_unread

MOST_COLUMNS = 1 << 16  # maximum number of bytes of a record's JSON for rewards
FOR_TEMPLATES = "tools", "chat_template_kwargs"  # fields with variables of the chat template
OF_PAIRS = "chosen", "rejected", "margin"  # fields of preference data, which supervised fine-tuning ignores
Form = Callable[[Encoder, Iterable[Record]], Iterator[Example]]


def supervised(encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
    """Examples for supervised fine-tuning: a conversation (`messages`), a `prompt` and its `completion`, or a
    `text`."""
    for record in records:
        with placed(record):
            sequences = own_sequences(encoder, record.values)
        for sequence in sequences:
            yield Example([sequence], record.place, source=record.source)


def prompted(encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
    """Examples for reinforcement learning: a prompt for the model to answer. The tokens of `answer`, if any, and an end
    token follow, unseen by the model; rewards may read all fields but `prompt`."""
    end = encoder.end or encoder.tokenizer.end_ids[:1] or [0]
    for record in records:
        with placed(record):
            if record.values.get("prompt") is None:
                raise missing(record.values, "prompt, and answer if the reward needs one")
            before = encoder.prompt(record.values["prompt"], variables(record.values))
            after = encoder.tokenizer.encode(answer_text(record.values.get("answer")), special=False) + end
            trained = [False] * len(before) + [True] * len(after)
            sequence = TokenSequence(before + after, trained, unread=len(after))
            yield Example([sequence], record.place, columns=columns(record.values), source=record.source)


def columns(values: Mapping[str, Any]) -> str:
    """The fields besides the prompt as a JSON object, for rewards, without values that JSON cannot represent."""
    kept = []
    for name in values.keys() - {"prompt"}:
        try:
            kept.append(f"{json.dumps(name)}: {json.dumps(values[name])}")
        except (TypeError, ValueError, RecursionError):
            continue
    text = f"{{{', '.join(sorted(kept))}}}" if kept else ""
    if len(text) > MOST_COLUMNS:  # ASCII: one byte per character
        raise UserError(
            f"cannot give rewards its fields besides prompt, because they take {len(text):,} bytes as JSON, more than "
            f"{MOST_COLUMNS:,}: leave out the fields that no reward reads"
        )
    return text


def answer_text(value: Any) -> str:
    if not isinstance(value, str | int | float | None) or isinstance(value, bool):
        raise UserError(f"answer is {shown(value)}: give a text or a number")
    return "" if value is None else str(value)


def with_fields(records: Iterable[Record], names: Collection[str], reward: str) -> Iterator[Record]:
    """Yield the records unchanged; raise a UserError if a record lacks a field in `names`, which `reward` reads."""
    for record in records:
        with placed(record):
            for name in names:
                value = record.values.get(name)
                value = answer_text(value).strip() if name == "answer" else value
                if value is None or value in ("", []):
                    raise UserError(f"it has no {name}, which the reward {reward} needs: add one")
        yield record


def variables(values: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template: the record's `tools` and the entries of its `chat_template_kwargs`."""
    more = values.get("chat_template_kwargs") or {}
    if not isinstance(more, Mapping) or {"messages", "tools", "add_generation_prompt"} & more.keys():
        raise UserError(
            f"chat_template_kwargs is {shown(more)}: give an object with variables of the chat template other than "
            "messages, tools and add_generation_prompt"
        )
    given = {str(name): value for name, value in more.items() if value is not None}
    return given | ({"tools": values["tools"]} if values.get("tools") else {})


def answer_sequence(encoder: Encoder, prompt: Any, answer: Any, given: Mapping[str, Any]) -> TokenSequence:
    """A prompt and its answer (both texts, or both messages) as one sequence; only the answer is trained."""
    if isinstance(answer, str):
        check_text(answer, "answer")
    return encoder.answer(prompt, answer, given)


def own_sequences(encoder: Encoder, values: Mapping[str, Any]) -> list[TokenSequence]:
    if has(values, "messages"):
        check_unread(values, ("messages", *FOR_TEMPLATES, *OF_PAIRS, "label"))
        return encoder.conversations(values["messages"], variables=variables(values))
    if has(values, "prompt", "completion"):
        check_unread(values, ("prompt", "completion", *FOR_TEMPLATES, *OF_PAIRS, "label"))
        if values.get("label") in (0, False):
            raise UserError(
                f"cannot train its completion, because its label {values['label']!r} marks an unwanted answer: use "
                "the method kto, or remove the record"
            )
        if isinstance(completion := values["completion"], str):
            check_text(completion, "answer")
        return encoder.answers(values["prompt"], completion, variables(values))
    if has(values, "text"):
        check_unread(values, ("text", "label"))
        return [encoder.document(values["text"])]
    raise missing(values, "messages, prompt and completion, or text")


def preferred(encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
    """Examples for preference training: the prompt with the chosen answer, the prompt with the rejected one, and the
    `margin` between them, if given."""
    for record in records:
        with placed(record):
            prompt, *answers = pair(record.values)
            given = variables(record.values)
            sequences = [answer_sequence(encoder, prompt, answer, given) for answer in answers]
            yield Example(sequences, record.place, margin(record.values), source=record.source)


def pair(values: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return (prompt, chosen, rejected); the prompt of two whole conversations is their common prefix."""
    if not has(values, "chosen", "rejected"):
        raise missing(values, "chosen and rejected, with a prompt")
    prompt, chosen, rejected = values.get("prompt"), values["chosen"], values["rejected"]
    whole = isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list)
    check_unread(values, ("chosen", "rejected", "margin", "label", *FOR_TEMPLATES, *([] if whole else ["prompt"])))
    if chosen == rejected:
        raise UserError("chosen and rejected are equal: remove this record")
    if whole:
        same = [one == other for one, other in zip(chosen, rejected)]
        first = (*same, False).index(False)
        prompt, chosen, rejected = chosen[:first], chosen[first:], rejected[first:]
    return "" if prompt is None else prompt, chosen, rejected


def margin(values: Mapping[str, Any]) -> dict[str, float]:
    if values.get("margin") is None:
        return {}
    return {"margin": number(values["margin"], "margin")}


def number(value: Any, name: str) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # the integer is too large for a float
        pass
    raise UserError(f"{name} is {shown(value)}: give a finite number")


def judged(encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
    """Examples for KTO: a prompt, a completion and a `label`, whether the completion is wanted; a pair of answers
    becomes two examples.

    The second sequence is the prompt with the completion of the nearest earlier example with another prompt, wrapping
    around at the start of the table."""
    rows: list[tuple[Any, Any, TokenSequence, float, Record]] = []
    for record in records:
        with placed(record):
            values = record.values
            if has(values, "chosen", "rejected"):
                prompt, chosen, rejected = pair(values)
                answers = [(chosen, 1.0), (rejected, 0.0)]
            elif has(values, "completion", "label"):
                check_unread(values, ("prompt", "completion", "label", *FOR_TEMPLATES))
                prompt = "" if values.get("prompt") is None else values["prompt"]
                answers = [(values["completion"], wanted(values["label"]))]
            else:
                raise missing(values, "completion and label, or chosen and rejected, with a prompt")
            given = variables(values)
            own = Record(given, record.place, record.source)
            for answer, label in answers:
                rows.append((prompt, answer, answer_sequence(encoder, prompt, answer, given), label, own))
    partners = other_prompts([prompt for prompt, *_ in rows])
    for (prompt, _, sequence, label, record), partner in zip(rows, partners):
        with placed(record):
            if partner is None:
                raise UserError(
                    "cannot estimate the divergence, because all examples have the same prompt: add other prompts"
                )
            other = encoder.answer(prompt, rows[partner][1], record.values)
            yield Example([sequence, other], record.place, {"label": label}, source=record.source)


def wanted(label: Any) -> float:
    if not isinstance(label, int | float) or label not in (0, 1):
        raise UserError(f"label is {shown(label)}: give 1 or true for a wanted answer, 0 or false for an unwanted one")
    return float(label)


def other_prompts(prompts: Sequence[Any]) -> list[int | None]:
    """For each prompt, the index of the nearest earlier prompt that differs and has the same kind (text or messages),
    wrapping around at the start; None if there is no such prompt."""
    partners: list[int | None] = [None] * len(prompts)
    for texts in (True, False):
        indices = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) == texts]
        for before, i in zip(indices[-1:] + indices, indices):
            if before == indices[-1]:  # the first prompt: wrap around, and search from the end
                partners[i] = next((j for j in reversed(indices) if prompts[j] != prompts[i]), None)
            else:  # compare with the previous prompt only
                partners[i] = before if prompts[before] != prompts[i] else partners[before]
    return partners


def classified(encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
    """Examples for a classifier: `text`, perhaps a second text in `pair`, and the index of `label` among
    `encoder.labels`. If these are empty, they become all labels of `records`, sorted."""
    rows: list[tuple[TokenSequence, Any, Record]] = []
    for record in records:
        with placed(record):
            text, pair, label = (record.values.get(name) for name in ("text", "pair", "label"))
            if not isinstance(text, str) or not isinstance(pair, str | None) or type(label) not in (str, int, bool):
                raise missing(
                    record.values,
                    "text and label, and optionally pair (text, pair: texts; label: a text or whole number)",
                )
            check_unread(record.values, ("text", "pair", "label"))
            sequence = encoder.texts(text, *([] if pair is None else [pair]))
            rows.append((sequence, label, Record({}, record.place, record.source)))
    named = {str(label): label for _, label, _ in rows}
    encoder.labels = encoder.labels or tuple(sorted(named, key=lambda name: order_of(named[name])))
    for sequence, label, record in rows:
        with placed(record):
            if str(label) not in encoder.labels:
                raise UserError(f"label is {label!r}: {nearest(str(label), encoder.labels)}")
        yield Example(
            [sequence], record.place, {"label": float(encoder.labels.index(str(label)))}, source=record.source
        )


def order_of(label: str | int) -> tuple[bool, str | int]:
    return isinstance(label, str), label


@contextmanager
def placed(record: Record) -> Iterator[None]:
    """Add the record's location to the message of a UserError raised inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{record.place}: {error}") from None


def has(values: Mapping[str, Any], *names: str) -> bool:
    return all(values.get(name) is not None for name in names)


def missing(values: Mapping[str, Any], wanted: str) -> UserError:
    """The UserError for a record that lacks needed fields, named in words by `wanted`."""
    given = ", ".join(repr(name) for name, value in values.items() if value is not None)
    empty = ", ".join(repr(name) for name, value in values.items() if value is None)
    has = given or (f"no value in {empty}" if empty else "no fields")
    way = "" if not given else ": rename columns, such as --columns prompt=question,completion=answer"
    return UserError(f"it needs {wanted}, but has {has}{way or ': remove the record, or fill it in'}")
