"""Messages with the field names of other tools, in any order, and nested columns."""

import json
from pathlib import Path
from typing import Any

import pytest

from onward import Tokenizer, UserError, train_tokenizer
from onward.data import Encoder, Record
from onward.data.forms import supervised
from onward.data.layouts import Records, converted
from onward.data.messages import ROLES
from onward.text import with_template
from onward.text.templates import TEMPLATES

user, answer, system, tool = (
    {"role": role, "content": text}
    for role, text in (("user", "2?"), ("assistant", "3"), ("system", "Be!"), ("tool", "5"))
)


def test_keys_that_arrow_fills_with_nulls_are_absent(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    calls = [
        {"type": "function", "function": {"name": "a", "arguments": {"n": 1}}},
        {"type": "function", "function": {"name": "b", "arguments": {"city": "Rome"}}},
    ]
    talk: list[dict[str, Any]] = [
        user,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {**tool, "name": "a"},
        answer,
    ]
    tools = [{"name": "a", "parameters": {"n": {"type": "number"}}}, {"name": "b", "parameters": {"city": {"x": "y"}}}]
    parquet.write_table(arrow.Table.from_pylist([{"messages": talk, "tools": tools}]), tmp_path / "a.parquet")
    (record,) = Records([str(tmp_path / "a.parquet")])
    bare = [{name: value for name, value in one.items() if value is not None} for one in talk]
    assert record.values == {"messages": bare, "tools": tools}


# a turn in the format of another tool, and the expected message
ALIASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"from": "human", "value": "2?"}, user),
    ({"from": "human", "content": "2?"}, user),
    ({"role": "human", "content": "2?"}, user),
    ({"role": "gpt", "value": "3"}, answer),
    ({"role": "chatgpt", "content": "3", "name": None}, answer),
    ({"role": "function", "name": "sum", "content": "5"}, {**tool, "name": "sum"}),
    ({"role": "model", "content": "3"}, {**answer, "role": "model"}),
    ({"role": "observation", "content": "5"}, {**tool, "role": "observation"}),
    ({"role": "developer", "content": "Be!"}, {**system, "role": "developer"}),
    (
        {"role": "assistant", "content": None, "function_call": {"name": "sum", "arguments": "{}"}},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "sum", "arguments": "{}"}}],
        },
    ),
    ({"role": "assistant", "content": "3", "function_call": None}, answer),
]


@pytest.mark.parametrize("field", ["messages", "conversations", "prompt", "chosen"])
def test_messages_are_read_under_the_names_of_other_tools(field: str) -> None:
    for written, read in ALIASES:
        row = {field: [written]} | ({"rejected": [tool]} if field == "chosen" else {})
        values = converted(Record(row, "")).values
        if field == "conversations" and "from" in written:
            assert values["messages"] == [{**read, "role": ROLES[read["role"]]}]
        else:
            assert values["messages" if field == "conversations" else field] == [read]


def test_conversations_need_not_alternate() -> None:
    names = with_template(train_tokenizer("byte", []), "chatml")
    talks = [[user, user, answer], [answer, user, answer], [user, system, answer], [user, answer, answer]]
    for talk in talks:
        (example,) = supervised(Encoder(names), [converted(Record({"messages": talk}, ""))])
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in talk)
        assert names.inner.decode([*example.sequences[0].tokens], skip_special_tokens=False) == text
        kept = [i for i, own in zip(example.sequences[0].tokens, example.sequences[0].trained) if own]
        answers = sum(one is answer for one in talk)
        assert names.inner.decode(kept, skip_special_tokens=False) == "3<|im_end|>" * answers


def test_error_of_the_template_names_the_record() -> None:
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    names = Tokenizer(train_tokenizer("byte", []).inner, templates={"default": source})
    with pytest.raises(UserError, match=r"^a\.jsonl line 7: the chat template .*: roles must alternate"):
        list(supervised(Encoder(names), [Record({"messages": [user, user, answer]}, "a.jsonl line 7")]))


def test_a_column_may_be_a_path(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"data": {"q": "2?", "a": {"text": "3"}, "id": 7}, "flat.q": "2?"}\n')
    path = str(tmp_path / "a.jsonl")
    (record,) = Records([path], "prompt=data.q,completion=data.a.text")
    assert record.values == {"prompt": "2?", "completion": "3", "data": {"a": {}, "id": 7}, "flat.q": "2?"}
    (record,) = Records([path], "prompt=flat.q,completion=data.a.text")
    assert record.values["prompt"] == "2?"
    with pytest.raises(UserError, match=r"line 1: it has no column 'data\.b'"):
        list(Records([path], "prompt=data.b"))
    for row in {"text": None}, {"messages": None, "text": None}:
        with pytest.raises(UserError, match=r"it needs messages, .*, but has no value in .*'text': remove the record"):
            list(supervised(Encoder(train_tokenizer("byte", [])), [Record(row, "")]))


ARGUMENTS: list[Any] = [{}, {"n": 3}, {"b": True}, {"x": [1, 2]}, {"x": None}, "", None, {"city": "Rome"}, '{"n": 3}']


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_calls_of_tools_are_trained_with_and_without_text(arguments: Any) -> None:
    names = with_template(train_tokenizer("byte", []), "hermes")
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [user, {"role": "assistant", "content": None, "tool_calls": [call]}, tool, answer]
    (example,) = supervised(Encoder(names), [converted(Record({"messages": talk}, ""))])
    kept = [i for i, own in zip(example.sequences[0].tokens, example.sequences[0].trained) if own]
    read = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    called = json.dumps({"name": "f", "arguments": read})
    text = f"<tool_call>\n{called}\n</tool_call><|im_end|>3<|im_end|>"
    assert names.inner.decode(kept, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "hermes"])
def test_calls_and_tools_that_a_template_does_not_write_are_refused(name: str) -> None:
    encoder = Encoder(with_template(train_tokenizer("byte", []), name))
    call = {"type": "function", "function": {"name": "f", "arguments": {"n": 3}}}
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    for made in {"role": "assistant", "content": None, "tool_calls": [call]}, old:
        for talk in [user, made], [user, made, {**tool, "role": "tool"}, answer]:
            with pytest.raises(UserError, match=r"^a row: message 2 has tool_calls, .* such as --template hermes"):
                list(supervised(encoder, [converted(Record({"messages": talk}, "a row"))]))
    with pytest.raises(UserError, match=r"^a row: cannot use its tools, because the chat template does not write them"):
        list(supervised(encoder, [converted(Record({"messages": [user, answer], "tools": [call]}, "a row"))]))
