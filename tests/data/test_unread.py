"""Every field of a row and of a message is read, is harmless, or is refused by name if it contains text to learn
from."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward import Tokenizer, UserError, train_tokenizer
from onward.data import Encoder, Example, Record
from onward.data.forms import classified, judged, preferred, prompted, supervised
from onward.data.layouts import Records, converted
from onward.data.messages import with_system
from onward.data.unread import is_harmless
from onward.text import with_template

CHATML = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% if mood %}<mood>{{ mood }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% if m.plan %}<plan>{{ m.plan }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<call>{{ call | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTES = with_template(train_tokenizer("byte", []), "chatml")
NAMES = Tokenizer(BYTES.inner, BYTES.bos, BYTES.eos, ends=BYTES.end_ids, templates={"default": CHATML})
ENCODER, PLAIN = Encoder(NAMES), Encoder(BYTES)
system, user, answer, worse = (
    {"role": role, "content": text}
    for role, text in (("system", "Be brief!"), ("user", "Two?"), ("assistant", "It is 2."), ("assistant", "No idea."))
)
TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"n": 3}}}
LABELED = {"prompt": [{**user, "content": "Three?"}], "completion": [answer], "label": False}


def made(form: Any, *rows: Any, encoder: Encoder = ENCODER) -> list[Example]:
    return list(form(encoder, [converted(Record(row, f"rows.jsonl line {i}")) for i, row in enumerate(rows, 1)]))


def written(example: Example, number: int = 0, encoder: Encoder = ENCODER) -> str:
    sequence = example.sequences[number]
    return encoder.tokenizer.inner.decode([*sequence.tokens], skip_special_tokens=False)


def trained(example: Example, number: int = 0) -> str:
    one = example.sequences[number]
    return NAMES.inner.decode([i for i, own in zip(one.tokens, one.trained) if own], skip_special_tokens=False)


FORMS: dict[str, tuple[Any, dict[str, Any]]] = {  # the function that makes examples, and a row
    "messages": (supervised, {"messages": [user, answer]}),
    "completions": (supervised, {"prompt": [user], "completion": [answer]}),
    "preferences": (preferred, {"prompt": [user], "chosen": [answer], "rejected": [worse]}),
    "conversations": (preferred, {"chosen": [user, answer], "rejected": [user, worse]}),
    "questions": (preferred, {"question": "Two?", "chosen": "It is 2.", "rejected": "No idea."}),
    "Alpaca": (supervised, {"instruction": "Two?", "output": "It is 2."}),
    "ShareGPT": (supervised, {"conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2."}]}),
    "labels": (judged, {"prompt": [user], "completion": [answer], "label": True}),
    "prompts": (prompted, {"prompt": [user], "answer": "2"}),
}


def first(name: str, **more: Any) -> Example:
    form, row = FORMS[name]
    return made(form, {**row, **more}, *([LABELED] if form is judged else []))[0]


@pytest.mark.parametrize("name", FORMS)
def test_system_column_is_the_first_message(name: str) -> None:
    for column in "system", "system_prompt", "system_message":
        with_column = first(name, **{column: "Be brief!"})
        for i in range(len(with_column.sequences) if name != "labels" else 1):
            assert written(with_column, i) == f"<|im_start|>system\nBe brief!<|im_end|>\n{written(first(name), i)}"
    assert written(first(name, system="")) == written(first(name, system=None)) == written(first(name))


def test_system_column_is_refused_where_it_has_no_place() -> None:
    other = {"messages": [{**system, "content": "Be long!"}, user, answer], "system": "Be brief!"}
    same = {"messages": [system, user, answer], "system": "Be brief!"}
    assert with_system(same)["messages"] == [system, user, answer]
    refused(supervised, other, "its system text differs from the system message")
    texts = {"prompt": "Two?", "completion": "2", "system": "Be brief!"}
    refused(supervised, texts, "cannot put its system text before its prompt")
    refused(
        preferred, {"prompt": "Two?", "chosen": "2", "rejected": "3", "system": "Be!"}, "before its prompt, because"
    )
    refused(prompted, {"prompt": "Two?", "system": "Be!"}, "before its prompt, because")
    refused(supervised, {"messages": [user, answer], "system": ["Be!"]}, "system is ['Be!']: give a text")
    refused(
        supervised,
        {"text": "Two", "system": "Be!"},
        "cannot use its text 'Be!' in system, because Onward reads only text",
    )


def refused(form: Any, row: Any, sentence: str, encoder: Encoder = ENCODER) -> None:
    with pytest.raises(UserError, match=f"^rows.jsonl line 1: .*{re.escape(sentence)}") as caught:
        made(form, row, *([LABELED] if form is judged else []), encoder=encoder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("question", ["instruction", "question", "query", "input"])
def test_questions_are_the_prompts_of_preferences(question: str) -> None:
    row = {"system": "Be brief!", question: "Two?", "chosen": "It is 2.", "rejected": "No idea."}
    (example,) = made(preferred, row)
    asked = "<|im_start|>system\nBe brief!<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    assert [written(example, i) for i in (0, 1)] == [f"{asked}{end}<|im_end|>\n" for end in ("It is 2.", "No idea.")]
    assert [trained(example, i) for i in (0, 1)] == ["It is 2.<|im_end|>", "No idea.<|im_end|>"]
    talks = {question: "Two?", "chosen": [user, answer], "rejected": [user, worse]}
    answers = {question: "Two?", "chosen": [answer], "rejected": [worse]}
    assert [written(made(preferred, one)[0]) for one in (talks, answers)] == [written(first("questions"))] * 2
    lost = {question: "Three?", "chosen": [user, answer], "rejected": [user, worse]}
    refused(preferred, lost, f"cannot use its text 'Three?' in {question}, because Onward reads only chosen, rejected")


def test_text_prompt_of_answers_that_are_messages_is_a_message() -> None:
    row = {"prompt": "Two?", "chosen": [answer], "rejected": [worse]}
    assert written(made(preferred, row)[0]) == written(first("preferences"))
    whole = {"prompt": "Two?", "chosen": [user, answer], "rejected": [user, worse]}
    assert written(made(preferred, whole)[0]) == written(first("preferences"))
    refused(preferred, {**whole, "prompt": "Three?"}, "cannot use its text 'Three?' in prompt, because")


@pytest.mark.parametrize("name", [name for name in FORMS if name != "prompts"])
def test_columns_with_texts_to_learn_are_refused_by_name(name: str) -> None:
    form, row = FORMS[name]
    for column in (
        "response",
        "answer",
        "context",
        "output2",
        "notes",
        "reasoning",
        "thinking",
        "text2",
        "prompt_text",
    ):
        refused(form, {**row, column: "Read this."}, f"cannot use its text 'Read this.' in {column}")
        refused(form, {**row, column: [{"note": "Read this."}]}, f"in {column}.note, because Onward reads only")
        assert written(first(name, **{column: ""})) == written(first(name, **{column: None})) == written(first(name))
    refused(form, {**row, "weight": 0.5}, "cannot use its weight 0.5, because all examples weigh the same")
    refused(form, {**row, "train": False}, "cannot use its train False, because all examples weigh the same")
    assert written(first(name, weight=1, train=True)) == written(first(name))


@pytest.mark.parametrize("name", FORMS)
def test_harmless_columns_change_nothing(name: str) -> None:
    columns: dict[str, Any] = {
        "id": "a b",
        "prompt_id": "a1",
        "score": "good",
        "model_name": "M",
        "createdAt": "now",
        "lang": "en",
    }
    columns |= {
        "metadata": {"about": "a text"},
        "source": "the web",
        "num_tokens": 5,
        "scores": [1, 2],
        "avatarUrl": "x",
    }
    columns |= {
        "conversation_hash": "ab",
        "done": True,
        "nested": {"id": "a1", "n": 1},
        "empty": [""],
        "category": "QA",
    }
    assert written(first(name, **columns)) == written(first(name))
    assert not any(map(is_harmless, ("question", "response", "id_text", "history", "", "model_output", "answers")))


def test_texts_that_repeat_what_is_read_are_harmless() -> None:
    rendered = "Below is a task.\n### Instruction:\nAdd\n\n### Input:\n1 2\n\n### Response:\n3 is the sum"
    made(supervised, {"instruction": "Add", "input": "1 2", "output": "3 is the sum", "text": rendered})
    made(supervised, {"prompt": "Two?", "prompt_id": "7", "messages": [user, answer]})
    made(preferred, {**FORMS["conversations"][1], "prompt": "Two?", "messages": [user, answer]})
    refused(supervised, {"messages": [user, answer], "response": "is"}, "cannot use its text 'is' in response")


def test_rewards_get_all_other_columns() -> None:
    (example,) = made(prompted, {"prompt": [user], "response": "Read this.", "weight": 0.5, "notes": "no"})
    assert json.loads(example.columns) == {"response": "Read this.", "weight": 0.5, "notes": "no"}


def test_ignored_columns_are_left_out(tmp_path: Path) -> None:
    row = {"messages": [user, answer], "critique": "Bad.", "tools": TOOLS, "data": {"text": "a", "id": 1}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (record,) = Records([str(tmp_path / "a.jsonl")], ignore="critique, tools,data")
    assert record.values == {"messages": [user, answer]}
    (record,) = Records([str(tmp_path / "a.jsonl")], "text=data.text")
    assert (record.values["text"], record.values["data"]) == ("a", {"id": 1})


@pytest.mark.parametrize("name", FORMS)
def test_tools_and_variables_of_the_template_are_honored(name: str) -> None:
    plain = written(first(name))
    more: dict[str, Any] = {"tools": TOOLS, "chat_template_kwargs": {"mood": "glad", "level": 2}}
    assert written(first(name, **more)) == f"<tools>{json.dumps(TOOLS)}</tools><mood>glad{plain}"
    assert written(first(name, functions=[TOOLS[0]["function"]])) == f"<tools>{json.dumps(TOOLS)}</tools>{plain}"
    form, row = FORMS[name]
    refused(form, {**row, "tools": TOOLS}, "cannot use its tools, because the chat template", PLAIN)
    refused(form, {**row, "chat_template_kwargs": {"tone": "x"}}, "cannot use tone of chat_template_kwargs, because")
    refused(
        form, {**row, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs is {'tools': []}: give an object"
    )
    if name == "labels":
        assert all("<mood>glad" in written(made(judged, {**row, **more}, LABELED)[0], i) for i in (0, 1))


def test_tools_beside_texts_are_refused() -> None:
    for form, row in (
        (supervised, {"prompt": "Two?", "completion": "2"}),
        (preferred, {"prompt": "Two?", "chosen": "2", "rejected": "3"}),
        (prompted, {"prompt": "Two?"}),
    ):
        refused(form, {**row, "tools": TOOLS}, "cannot use its tools, because its prompt is a text")
    refused(supervised, {"text": "Two?", "tools": TOOLS}, "it has tools, which only messages use")


def test_unwanted_answers_are_not_imitated() -> None:
    row = {"prompt": "Two?", "completion": "3", "label": False}
    refused(supervised, row, "its label False marks an unwanted answer")
    made(supervised, {**row, "label": True})
    made(classified, {"text": "Two", "label": "a"}, {"text": "Three", "label": "b"})
    refused(classified, {"text": "Two", "label": "a", "question": "What?"}, "cannot use its text 'What?' in question")


SENT = [user, answer, user, {**answer, "content": "Still 2."}]


@pytest.mark.parametrize("flag", ["weight", "train", "training", "loss"])
def test_messages_of_weight_zero_are_read_and_not_trained(flag: str) -> None:
    for off in (0, False, 0.0):
        talk = [user, {**answer, flag: off}, user, {**answer, "content": "Still 2.", flag: 1}]
        (example,) = made(supervised, {"messages": talk})
        assert trained(example) == "Still 2.<|im_end|>"
        assert written(example) == written(made(supervised, {"messages": SENT})[0])
    turns = [{"from": "human", "value": "Two?", "weight": 0}, {"from": "gpt", "value": "It is 2.", "weight": 1}]
    assert trained(made(supervised, {"conversations": turns})[0]) == "It is 2.<|im_end|>"
    for bad in (0.5, "1", [1]):
        refused(supervised, {"messages": [user, {**answer, flag: bad}]}, f"message 2 has the {flag} {bad!r}: give 1")
    refused(supervised, {"messages": [user, {**answer, flag: 0}]}, "because it has no answer to train")
    if flag != "weight":
        refused(supervised, {"messages": [{**user, flag: True}, answer]}, f"cannot train message 1 ({flag} True)")


def test_fields_of_messages_are_written_harmless_or_refused() -> None:
    ids = {
        "name": "Ann",
        "id": "m 1",
        "tool_call_id": "c 1",
        "timestamp": "now",
        "weight": None,
        "refusal": None,
        "n": 2,
    }
    talk = [{**user, **ids}, {**answer, **ids}]
    assert written(made(supervised, {"messages": talk})[0]) == written(first("messages"))
    for field in ("notes", "refusal", "context"):
        for i in (0, 1):
            talk = [dict(user), dict(answer)]
            talk[i][field] = "Read this."
            sentence = f"message {i + 1} has 'Read this.' in {field}, which the chat template does not write"
            refused(supervised, {"messages": talk}, sentence)
            refused(prompted, {"prompt": talk}, sentence)
    planned = made(supervised, {"messages": [user, {**answer, "plan": "Think."}]})[0]
    assert trained(planned) == "It is 2.<plan>Think.<|im_end|>"
    for field in ("thinking", "reasoning_content"):
        refused(supervised, {"messages": [user, {**answer, field: "Hm."}]}, "message 2 has ")
    refused(supervised, {"messages": [user, {"role": "assistant", "tool_calls": [CALL]}]}, "message 2 has", PLAIN)


def random_rows(draw: random.Random) -> Iterator[tuple[Any, dict[str, Any], str]]:
    """Yield (form, row, text): the row has this unique text in a random column or message field."""
    words = ["question", "response", "extra", "Note", "full_text", "user_input", "data", "x", "reasoningSteps"]
    for name, (form, row) in FORMS.items():
        if form is not prompted:
            column, mark = draw.choice(words), f"a mark {draw.random()}"
            value = draw.choice([mark, [mark], {"inner": mark}, [[{"deep": [mark]}]]])
            if column not in row:
                yield form, {**row, column: value}, mark
        talks = [field for field in row if isinstance(row[field], list) and name != "ShareGPT"]
        for field in draw.sample(talks, min(1, len(talks))):
            mark, at = f"a mark {draw.random()}", draw.randrange(len(row[field]))
            talk = [{**one, draw.choice(words): mark} if i == at else one for i, one in enumerate(row[field])]
            yield form, {**row, field: talk}, mark


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_no_text_of_a_row_is_lost_in_silence(count: int) -> None:
    draw = random.Random(46)
    for _ in range(count):
        for form, row, mark in random_rows(draw):
            try:
                examples = made(form, row, *([LABELED] if form is judged else []))
            except UserError as error:
                told = str(error)
            else:
                told = "".join(written(one, i) for one in examples for i in range(len(one.sequences)))
            assert mark in told, row


FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_answers_that_are_written_differently_later_are_examples_of_their_own() -> None:
    names = Tokenizer(BYTES.inner, BYTES.bos, BYTES.eos, ends=BYTES.end_ids, templates={"default": FORGETS})
    thought = {**answer, "reasoning_content": "1 + 1"}
    examples = made(supervised, {"messages": [user, thought, user, thought]}, encoder=Encoder(names))
    asked, said = "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n", "It is 2.<|im_end|>"
    whole = [f"{asked}<think>1 + 1</think>{said}", f"{asked}{said}\n{asked}<think>1 + 1</think>{said}"]
    assert [written(one).removesuffix("\n") for one in examples] == whole
    assert [trained(one) for one in examples] == [f"<think>1 + 1</think>{said}"] * 2
    row = {"prompt": [user], "chosen": [thought, user, thought], "rejected": [worse]}
    refused(preferred, row, "the conversation becomes 2 examples", Encoder(names))
