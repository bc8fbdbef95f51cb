"""Layouts of published data: each row becomes one record, which equals TRL's conversion if TRL has one."""

import csv
import gzip
import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import UserError, train_tokenizer
from onward.cli import main
from onward.data import Encoder, Record, read_records
from onward.data.columns import renaming
from onward.data.forms import judged, preferred, prompted, supervised
from onward.data.layouts import LAYOUTS, Records, converted, layout_of
from onward.data.messages import ROLES
from onward.text import with_template

user, answer, system, tool = (
    {"role": role, "content": text}
    for role, text in (("user", "2?"), ("assistant", "3"), ("system", "Be!"), ("tool", "5"))
)
NO = {"role": "assistant", "content": "5"}
PAIR, PARTS = {"prompt": "2?", "chosen": "3", "rejected": "5"}, [{"type": "text", "text": text} for text in "2?"]
JUDGED, ANSWERED = {"prompt": "2?", "completion": "3", "label": 1}, {"prompt": "2?", "completion": "3"}
turn = lambda name, text: {"from": name, "value": text}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # name of the layout, a row, expected record
    "sharegpt": (
        "ShareGPT conversations",
        {"conversations": [turn("system", "Be!"), turn("human", "2?"), turn("gpt", "3")], "id": 7},
        {"messages": [system, user, answer], "id": 7},
    ),
    "sharegpt with tools": (
        "ShareGPT conversations",
        {"conversations": [turn("human", "2?"), turn("function_call", "3"), turn("observation", "5")], "system": "Be!"},
        {"messages": [system, user, answer, tool]},
    ),
    "sharegpt with roles": ("ShareGPT conversations", {"conversations": [user, answer]}, {"messages": [user, answer]}),
    "sharegpt preferences": (
        "ShareGPT preferences",
        {"conversations": [turn("human", "2?")], "chosen": turn("gpt", "3"), "rejected": turn("gpt", "5")},
        {"prompt": [user], "chosen": [answer], "rejected": [{"role": "assistant", "content": "5"}]},
    ),
    "sharegpt with a label": (
        "ShareGPT conversations",
        {"conversations": [turn("human", "2?"), turn("gpt", "3")], "kto_tag": True},
        {"prompt": [user], "completion": [answer], "label": True},
    ),
    "alpaca": ("Alpaca instructions", {"instruction": "2?", "input": "", "output": "3"}, {"messages": [user, answer]}),
    "alpaca with an input": (
        "Alpaca instructions",
        {"instruction": "Add", "input": "1 2", "output": "3"},
        {"messages": [{"role": "user", "content": "Add\n\n1 2"}, answer]},
    ),
    "alpaca with a history": (
        "Alpaca instructions",
        {"instruction": "2?", "output": "3", "system": "Be!", "history": [["2?", "3"]]},
        {"messages": [system, user, answer, user, answer]},
    ),
    "alpaca preferences": (
        "Alpaca preferences",
        {"instruction": "2?", "chosen": "3", "rejected": "5"},
        {"prompt": [user], "chosen": [answer], "rejected": [{"role": "assistant", "content": "5"}]},
    ),
    "messages": ("messages", {"messages": [user, answer]}, {"messages": [user, answer]}),
    "parts of text": (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "?"}]},
                answer,
            ]
        },
        {"messages": [user, answer]},
    ),
    "pairs": ("preferences", PAIR, PAIR),
    "pairs of messages": (
        "preferences",
        {"prompt": [user], "chosen": [answer], "rejected": [tool]},
        {"prompt": [user], "chosen": [answer], "rejected": [tool]},
    ),
    "pairs after a question": (
        "preferences after questions",
        {"system": "Be!", "question": "2?", "chosen": "3", "rejected": "5"},
        {"prompt": [system, user], "chosen": [answer], "rejected": [NO]},
    ),
    "pairs that share a prompt": (
        "preferences without prompts",
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    ),
    "conversations that share a prompt": (
        "preferences without prompts",
        {"chosen": [user, answer], "rejected": [user, tool]},
        {"chosen": [user, answer], "rejected": [user, tool]},
    ),
    "labels": ("labeled completions", JUDGED, JUDGED),
    "completions": ("prompts and completions", ANSWERED, ANSWERED),
    "prompts": ("prompts", {"prompt": "2?", "answer": "3"}, {"prompt": "2?", "answer": "3"}),
    "classes": ("labeled texts", {"text": "2", "label": "a"}, {"text": "2", "label": "a"}),
    "texts": ("texts", {"text": "2"}, {"text": "2"}),
}


def test_every_layout_has_a_case() -> None:
    assert {name for name, _, _ in CASES.values()} == {layout.name for layout in LAYOUTS}


@pytest.mark.parametrize("case", CASES)
def test_a_row_is_recognized_and_becomes_a_record(case: str) -> None:
    name, row, record = CASES[case]
    layout = layout_of(row)
    assert layout is not None
    assert layout.name == name
    before = json.dumps(row)
    assert converted(Record(row, "here")).values == record
    assert json.dumps(row) == before, "the row itself is left as it is"


@pytest.mark.parametrize("case", ["sharegpt", "pairs that share a prompt", "conversations that share a prompt"])
def test_conversion_equals_that_of_trl(case: str) -> None:
    utils = pytest.importorskip("trl.data_utils", reason="needs TRL: pip install trl")
    _, row, record = CASES[case]
    if "conversations" in row:
        # TRL renames the column
        theirs = utils.maybe_convert_to_chatml({"conversations": deepcopy(row["conversations"])})
        talk = [{**one, "role": ROLES[one["role"]]} for one in theirs["messages"]]  # TRL keeps the role names
        assert record["messages"] == talk
        return
    theirs = utils.maybe_extract_prompt(dict(row))
    if isinstance(row["chosen"], str):
        assert {name: record[name] for name in ("prompt", "chosen", "rejected")} == theirs
    else:  # Onward splits the messages of pairs later, in `pair`
        from onward.data.forms import pair

        assert dict(zip(("prompt", "chosen", "rejected"), pair(record))) == theirs


FORMS: dict[str, Any] = {  # the conversational formats in TRL's documentation, and the function that reads each
    "messages": ({"messages": [system, user, answer]}, supervised),
    "prompts": ({"prompt": [user]}, prompted),
    "completions": ({"prompt": [system, user], "completion": [answer]}, supervised),
    "preferences": ({"prompt": [user, answer, user], "chosen": [answer], "rejected": [NO]}, preferred),
    "preferences without prompts": ({"chosen": [user, answer], "rejected": [user, NO]}, preferred),
    "labels": ({"prompt": [user], "completion": [answer], "label": True}, judged),
}


@pytest.mark.parametrize("case", FORMS)
def test_conversations_become_the_texts_that_trl_makes_of_them(case: str, tmp_path: Path) -> None:
    utils = pytest.importorskip("trl.data_utils", reason="needs TRL: pip install trl")
    from transformers import AutoTokenizer

    row, form = FORMS[case]
    tokenizer = with_template(train_tokenizer("byte", []), "chatml")
    tokenizer.save(tmp_path)
    named = AutoTokenizer.from_pretrained(tmp_path)
    theirs = utils.apply_chat_template(utils.maybe_extract_prompt(deepcopy(row)), named)
    other = {"prompt": [{**user, "content": "5?"}], "completion": [answer], "label": False}  # KTO needs two labels
    rows = [Record(one, "") for one in (row, other)]
    example, *_ = form(Encoder(tokenizer), map(converted, rows if form is judged else rows[:1]))
    text = lambda tokens: tokenizer.inner.decode(tokens, skip_special_tokens=False)
    answers = [theirs[name] for name in ("completion", "chosen", "rejected") if name in theirs]
    for sequence, ending in zip(example.sequences, answers or [theirs.get("text", "")]):
        trained = text([token for token, chosen in zip(sequence.tokens, sequence.trained) if chosen])
        if answers:
            assert text(sequence.tokens) == theirs["prompt"] + ending
            assert trained == ending.removesuffix("\n"), "the line break after the end of a turn is not trained"
        elif "text" in theirs:
            assert text(sequence.tokens) == ending
            assert trained == f"{answer['content']}<|im_end|>"
        else:
            assert text(sequence.tokens[: -sequence.unread]) == theirs["prompt"]


def test_tools_may_be_written_as_json() -> None:
    tools = [{"type": "function"}]
    for written, read in (json.dumps(tools), tools), ("", None), ("no", "no"), (tools, tools):
        row = {"messages": [user, answer], "tools": written}
        assert converted(Record(row, "")).values["tools"] == read


@given(st.lists(st.tuples(st.sampled_from(sorted(ROLES)), st.text()), min_size=1))
def test_every_turn_of_a_conversation_is_kept_in_order(turns: list[tuple[str, str]]) -> None:
    record = converted(Record({"conversations": [turn(name, text) for name, text in turns]}, ""))
    assert [(ROLES[name], text) for name, text in turns] == [
        (m["role"], m["content"]) for m in record.values["messages"]
    ]


@given(st.text(), st.text(), st.text())
def test_a_shared_prompt_and_the_answers_are_the_texts(prompt: str, chosen: str, rejected: str) -> None:
    row = converted(Record({"chosen": prompt + chosen, "rejected": prompt + rejected}, "")).values
    assert (row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]) == (prompt + chosen, prompt + rejected)


ROWS: list[dict[str, Any]] = [{"prompt": "a, b", "completion": "é\nc"}, {"prompt": "d", "completion": "[e"}]


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet", "json.gz", "csv.gz"])
def test_tables_of_every_format_have_the_same_rows(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{kind}"
    name = kind.removesuffix(".gz")
    if name == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    else:
        opened = gzip.open if kind.endswith(".gz") else open
        with opened(path, "wt", encoding="utf-8", newline="") as file:
            if name == "csv":
                table = csv.DictWriter(file, [*ROWS[0]])
                table.writeheader()
                table.writerows(ROWS)
            else:
                file.write(json.dumps(ROWS) if name == "json" else "".join(json.dumps(row) + "\n" for row in ROWS))
    assert [record.values for record in read_records(str(path))] == ROWS


def test_cells_of_a_csv_hold_json_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('completion,label,messages,note\nx,TRUE,"[{""role"": ""user""}]",\ny,0,,[no\n')
    rows = [record.values for record in read_records(str(tmp_path / "a.csv"))]
    assert rows == [
        {"completion": "x", "label": True, "messages": [{"role": "user"}]},
        {"completion": "y", "label": 0, "note": "[no"},
    ]


def test_columns_are_renamed_and_others_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "2?", "answer": "3", "level": 1}\n')
    records = Records([str(tmp_path / "a.jsonl")], "prompt=question, completion=answer")
    assert [record.values for record in records] == [{"prompt": "2?", "completion": "3", "level": 1}]
    assert records.sentences() == [f"{tmp_path / 'a.jsonl'}: 1 prompts and completions"]
    assert renaming("") == {}


IMAGE = {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}]}
WRONG: dict[str, tuple[str, str, str]] = {  # file name, content, expected message after the file name
    "an unknown speaker": (
        "a.jsonl",
        '{"conversations": [{"from": "humn", "value": "2?"}]}',
        "line 1: a turn is from 'humn': did you mean human",
    ),
    "a turn of text": ("a.jsonl", '{"conversations": ["2?"]}', "line 1: a turn is '2?': write it as {'role'"),
    "conversations of text": ("a.jsonl", '{"conversations": "2?"}', "line 1: conversations are '2?': write a list"),
    "an image": (
        "a.jsonl",
        json.dumps({"messages": [IMAGE]}),
        "line 1: cannot train on message 1, because its part of type 'image_url' is not text",
    ),
    "a column of images": (
        "a.jsonl",
        '{"messages": [], "images": ["x.png"]}',
        "line 1: cannot train on its images, because Onward trains on text: remove",
    ),
    "a history of texts": (
        "a.jsonl",
        '{"instruction": "a", "output": "b", "history": ["c"]}',
        "line 1: history has 'c': write pairs",
    ),
    "an object": (
        "a.json",
        '{"data": [{}]}',
        r"is dict, not an array of objects (its examples may be in 'data'): write it as",
    ),
    "an array of texts": ("a.json", '["a"]', "row 1 is str, not an object: write it as"),
    "an empty array": ("a.json", "[]", "is empty: name a table with rows"),
    "broken JSON": ("a.json", '[{"a": 1}', "is not JSON"),
    "deep JSON": ("a.json", "[" * 100_000, "is not JSON"),
    "a row too short": ("a.csv", "a,b\n1\n", "line 2 has 1 cells under 2 columns: quote cells that contain commas"),
    "a column twice": ("a.csv", "a,a\n1,2\n", "line 1 does not name its columns"),
    "a header alone": ("a.csv", "a,b\n", "is empty: name a table with rows"),
    "bytes": ("a.csv", "a\n\udcff\n", "cannot be read as .csv after line"),
    "a picture": ("a.png", "x", "is not a table: give .jsonl, .json, .csv, .parquet or hf://NAME"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_one_sentence(case: str, tmp_path: Path) -> None:
    name, content, sentence = WRONG[case]
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / name} {sentence}")):
        list(Records([str(tmp_path / name)]))


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ("prompt", "columns has 'prompt': write Onward's name and the data's, prompt=question"),
        ("prompt=", "columns has 'prompt=': write Onward's name"),
        ("prompt=questoin", "line 1: it has no column 'questoin': did you mean question"),
    ],
)
def test_wrong_columns_are_one_sentence(columns: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "2?"}\n')
    with pytest.raises(UserError, match=re.escape(sentence)):
        list(Records([str(tmp_path / "a.jsonl")], columns))


def test_data_show_prints_the_layout_and_the_trained_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([CASES["sharegpt"][1]] * 5))
    assert main(["data", "show", str(path), "--count", "2"]) == 0
    out = capsys.readouterr().err
    assert f"{path} row 2\n<|endoftext|>System: Be!User: 2?Assistant:" in out
    assert "[ 3" in out
    assert "row 3" not in out
    assert f"{path}: ShareGPT conversations" in out
    assert main(["data", "show", str(path), "--json", "--count", "1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["shapes"] == {str(path): ["ShareGPT conversations"]}
    assert [part["trained"] for part in shown["examples"][0]["sequences"][0]] == [False, True]
