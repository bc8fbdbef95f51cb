"""Examples: which tokens are trained, and packing into rows that neither cuts nor mixes examples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward import Tokenizer, UserError
from onward.data import IGNORE_INDEX, Encoder, Example, Record, read_records
from onward.data.examples import Examples, TokenSequence
from onward.data.forms import prompted, supervised
from onward.data.packing import PackedExamples, batch_of, best_fit, columns_of
from onward.data.tables import held_out, tabulated
from onward.text import Chat, with_template
from onward.text.templates import TEMPLATES, Template

from support.finetuning import sums, tokenizer, write_rows

USER, ANSWER = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "It is 5."}
SYSTEM = {"role": "system", "content": "Be brief!"}
TRICKY = {"role": "assistant", "content": "  <|im_end|> é<end_of_turn> [/INST] 5\n"}
TALKS = {
    "one turn": [USER, ANSWER],
    "two turns after a system message": [SYSTEM, USER, ANSWER, USER, {**ANSWER, "content": "5 again\n\nof course"}],
    "control tokens as text": [USER, TRICKY, USER, ANSWER],
}


def trained_text(names: Tokenizer, sequence: TokenSequence) -> str:
    """The trained tokens as text, including control tokens."""
    kept = [token for token, trained in zip(sequence.tokens, sequence.trained) if trained]
    return names.inner.decode(kept, skip_special_tokens=False)


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_trains_the_answers_and_their_end_tokens(name: str, talk: str) -> None:
    names = with_template(tokenizer(), name)
    end = TEMPLATES[name].end or names.eos
    answers = [m["content"].strip() + end for m in TALKS[talk] if m["role"] == "assistant"]
    got = trained_text(names, Encoder(names).conversation(TALKS[talk]))
    assert got.replace(" ", "") == "".join(answers).replace(" ", ""), "a token may begin with the template's space"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_of_a_template_begins_its_conversation(name: str) -> None:
    names = with_template(tokenizer(), name)
    whole = Encoder(names).conversation([USER, ANSWER]).tokens
    prompt = Chat(names).encode([USER])
    assert whole[: len(prompt)] == prompt
    assert {*names.end_ids} & {*whole[len(prompt) :]}, "the token that ends the answer ends generation too"


def test_messages_that_are_given_are_not_trained() -> None:
    names = with_template(tokenizer(), "chatml")
    got = Encoder(names).answer([USER, ANSWER, USER], [{"role": "assistant", "content": "Eleven."}])
    assert trained_text(names, got) == "Eleven.<|im_end|>"


def test_a_generation_block_says_what_is_trained() -> None:
    block = "{% generation %}Say: {{ m.content }}{{ eos_token }}!{% endgeneration %}"
    source = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% else %}" + block + "{% endif %}"
    names = tokenizer()
    names = Tokenizer(names.inner, templates={"default": source + "{% endfor %}"})
    got = Encoder(names).conversation([USER, ANSWER])
    assert trained_text(names, got) == "Say: It is 5.<|endoftext|>"


def test_calls_of_tools_are_trained() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %} call {{ call | tojson }} done"
        "{% endfor %}{{ eos_token }}{% endfor %}"
    )
    names = Tokenizer(tokenizer().inner, templates={"default": source})
    call = {"name": "sum", "arguments": {"numbers": [2, 3], "note": "brief"}}
    got = Encoder(names).conversation([USER, {**ANSWER, "tool_calls": [call]}])
    assert trained_text(names, got).endswith('"note": "brief"}} done<|endoftext|>')


@pytest.mark.parametrize("completion", [" It is 5.", "It is 5.", "\n5", ""])
def test_a_prompt_is_encoded_as_it_is_at_the_time_of_use(completion: str) -> None:
    names, prompt = tokenizer(), "2 + 3 = "
    got = Encoder(names).answer(prompt, completion)
    before = names.encode(prompt)
    assert list(got.tokens[: len(before)]) == before
    assert not any(got.trained[: len(before)])
    assert trained_text(names, got) == completion + names.eos


def test_a_text_is_trained_whole() -> None:
    names = tokenizer()
    got = Encoder(names).document("It is 5.")
    assert trained_text(names, got) == f"{names.eos}It is 5.{names.eos}"


NO_END = Tokenizer(tokenizer().inner, templates={"default": "{% for m in messages %}{{ m.content }}\n{% endfor %}"})
CHATML = with_template(tokenizer(), "chatml")
BAD: dict[str, tuple[Tokenizer, dict[str, Any], str]] = {
    "no template": (tokenizer(), {"messages": [USER, ANSWER]}, "no chat template .* --template plain"),
    "never closed": (NO_END, {"messages": [USER, ANSWER]}, "never closes the assistant's turn"),
    "never closed before the user": (NO_END, {"messages": [USER, ANSWER, USER, ANSWER]}, "never closes"),
    "no answer": (CHATML, {"messages": [USER]}, "because it has no answer to train"),
    "no messages": (CHATML, {"messages": "Hello"}, "messages are not a list"),
    "half a form": (CHATML, {"prompt": "Hello"}, "it needs messages, prompt and completion, or text, but has 'prompt'"),
    "both forms": (CHATML, {"prompt": "Hello", "completion": [ANSWER]}, "prompt and answer are str and list: "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_examples_are_one_sentence_with_their_place(case: str) -> None:
    names, values, sentence = BAD[case]
    with pytest.raises(UserError, match=f"^data.jsonl line 7: .*{sentence}") as caught:
        list(supervised(Encoder(names), [Record(values, "data.jsonl line 7")]))
    assert "\n" not in str(caught.value)


def test_rows_of_tables_are_read_with_their_places(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = sums(5)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    write_rows(tmp_path / "a.jsonl", rows)
    got = list(read_records(str(tmp_path)))
    assert [record.values for record in got] == rows + rows
    assert got[2].place.endswith("a.jsonl line 3")
    assert got[6].place.endswith("b.parquet row 2")


def examples(lengths: list[int], per_example: int = 1) -> list[Example]:
    """Examples whose tokens are all different."""
    first, made = 0, []
    for number, length in enumerate(lengths):
        sequences = []
        for _ in range(per_example):
            tokens = list(range(first, first + length))
            sequences.append(TokenSequence(tokens, [i % 3 > 0 for i in range(length)]))
            first += length
        made.append(Example(sequences, f"line {number + 1}", {"label": float(number)}))
    return made


@pytest.mark.parametrize("per_example", [1, 2])
@pytest.mark.parametrize("packed", [True, False])
def test_rows_hold_each_token_once_with_positions_of_its_own(packed: bool, per_example: int) -> None:
    lengths = [3, 9, 2, 4, 4, 7, 2, 9, 5]
    table, _ = tabulated(examples(lengths, per_example), 10, "error")
    rows = PackedExamples(table, 10, seed=3, packed=packed)
    epochs = [[rows.read([i]) for i in range(start, start + len(rows))] for start in (0, len(rows))]
    assert len(rows) == (5 if packed else len(lengths))
    for batches in epochs:
        seen = [batch.tokens[batch.sequences == s] for batch in batches for s in range(batch.num_sequences)]
        found = sorted(int(t) for batch in batches for t in batch.tokens[batch.targets != IGNORE_INDEX] + 1)
        wanted = [
            t
            for e in examples(lengths, per_example)
            for s in e.sequences
            for t, m in zip(s.tokens[1:], s.trained[1:])
            if m
        ]
        assert found == wanted, "each trained token is a target once"
        assert len(seen) == len(lengths) * per_example
    assert [b.tokens.tolist() for b in epochs[0]] != [b.tokens.tolist() for b in epochs[1]], "another order"


def test_targets_and_positions_of_a_row() -> None:
    table, _ = tabulated(examples([3, 2]), 10, "error")
    batch = batch_of(table, [[0, 1], [1]])
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4], [3, 4, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]]
    none = IGNORE_INDEX
    assert batch.targets.tolist() == [[1, 2, none, 4, none], [4, none, none, none, none]]
    assert batch.sequences[:, :2].tolist() == [[0, 0], [2, 2]]
    assert batch.numbers["label"].tolist() == [0.0, 1.0, 1.0]


def test_best_fit_fills_the_fullest_row_that_has_room() -> None:
    assert best_fit([5, 2, 3, 1], 5) == [[0], [2, 1], [3]]
    rows = best_fit(lengths := np.random.default_rng(0).integers(1, 60, 500).tolist(), 64)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(sum(lengths[i] for i in row) <= 64 for row in rows)
    assert len(rows) <= 1.05 * sum(lengths) / 64


def test_fields_for_rewards_are_stored_selected_and_read_again(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1?", "answer": "1", "level": [1, {"ü": None}], "image": b"no JSON"},
        {"prompt": "2?"},
        {"prompt": "3?", "level": 0.5},
    ]
    wanted: list[dict[str, Any]] = [{"answer": "1", "level": [1, {"ü": None}]}, {}, {"level": 0.5}]
    records = [Record(row, f"line {i}") for i, row in enumerate(rows)]
    table, _ = tabulated(prompted(Encoder(tokenizer()), records), 10, "error")
    table.select(np.array([2, 0, 1])).save(tmp_path / "table")
    loaded = Examples.load(tmp_path / "table")
    assert columns_of(batch_of(table, [[0], [1], [2]])) == wanted
    assert columns_of(batch_of(loaded, [[1], [2]])) == [wanted[0], wanted[1]]
    table.select(np.array([1])).save(tmp_path / "table")
    assert columns_of(batch_of(Examples.load(tmp_path / "table"), [[0]])) == [{}]
    plain, _ = tabulated(prompted(Encoder(tokenizer()), [Record({"prompt": "1?"}, "")] * 2), 10, "error")
    assert columns_of(batch_of(plain, [[0], [1]])) == [{}, {}]
    with pytest.raises(
        UserError, match=r"^line 5: cannot give rewards its fields .* because they take 70,014 bytes as JSON"
    ):
        list(prompted(Encoder(tokenizer()), [Record({"prompt": "1?", "level": "1" * 70_001}, "line 5")]))


def test_an_answer_that_a_reward_compares_with_is_a_text_and_is_never_cut() -> None:
    names = tokenizer()
    answers = {"5": "5", 5: "5", 2.5: "2.5", None: "", "is " * 20: "is " * 20}
    rows: list[dict[str, Any]] = [{"prompt": "2 + 3? " * (1 + i), "answer": answer} for i, answer in enumerate(answers)]
    records = [Record(row, f"line {i}") for i, row in enumerate([*rows, {"prompt": "4?"}])]
    longest = len(names.encode("2 + 3? "))
    table, left = tabulated(prompted(Encoder(names), records), longest, "cut")
    assert left.count == 4
    for i, wanted in enumerate([*answers.values(), ""]):
        sequence = table.sequence(i)
        assert trained_text(names, sequence) == wanted + names.eos
        assert 0 < sequence.trained.index(True) <= longest
    for answer in [5], {"is": 5}, True:
        with pytest.raises(UserError, match=r"line 1: answer is .*: give a text or a number"):
            list(prompted(Encoder(names), [Record({"prompt": "2?", "answer": answer}, "line 1")]))


def test_long_examples_are_an_error_cut_or_dropped() -> None:
    made = examples([4, 8, 6])
    with pytest.raises(
        UserError, match=r"2 of 3 examples are longer than 5 tokens \(line 2 has 8\): .*--too-long drop"
    ):
        tabulated(made, 5, "error")
    cut, left = tabulated(made, 5, "cut")
    assert (cut.lengths.tolist(), left.count) == ([4, 5, 5], 2)
    dropped, left = tabulated(made, 5, "drop")
    assert (dropped.lengths.tolist(), left.count) == ([4], 2)
    assert dropped.numbers["label"].tolist() == [0.0]
    with pytest.raises(UserError, match="all are too long"):
        tabulated(made, 3, "drop")


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table, _ = tabulated(examples([4, 2, 3], 2), 10, "error")
    table.save(tmp_path / "table.safetensors")
    again = type(table).load(tmp_path / "table.safetensors")
    for name in ("tokens", "trained", "ends"):
        assert (getattr(again, name) == getattr(table, name)).all()
    assert again.per_example == 2
    part = again.select(np.array([2, 0]))
    assert part.lengths.tolist() == [6, 8]
    assert part.tokens[:3].tolist() == table.tokens[table.starts[4] :][:3].tolist()


@pytest.mark.parametrize(("count", "share", "wanted"), [(10, 0.1, [9]), (6, 0.5, [1, 3, 5]), (4, 0.1, [])])
def test_held_out_examples_are_evenly_spread(count: int, share: float, wanted: list[int]) -> None:
    assert np.flatnonzero(held_out(count, share)).tolist() == wanted


@pytest.mark.parametrize("name", ["chatml2", "{{"])
def test_an_unknown_template_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"template is .*chatml"):
        with_template(tokenizer(), name)
    (tmp_path / "bad.jinja").write_text("{% for")
    with pytest.raises(UserError, match="the chat template cannot be used"):
        with_template(tokenizer(), str(tmp_path / "bad.jinja"))


def test_templates_name_the_control_tokens_that_they_write() -> None:
    for name, template in TEMPLATES.items():
        assert isinstance(template, Template)
        assert all(control in template.source for control in (*template.controls, template.end)), name
