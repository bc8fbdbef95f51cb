"""Records of preferences become examples: pairs, and answers with a label and a partner."""

from collections import defaultdict
from typing import Any

import pytest

import onward
from onward import UserError
from onward.data import Encoder, Record
from onward.data.forms import judged, preferred
from onward.text import with_template

from support.finetuning import sums, tokenizer

BAD = {
    "equal answers": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
    "no rejected": ({"prompt": "a", "chosen": "b"}, "needs chosen and rejected"),
    "a margin of text": (
        {"chosen": "b", "rejected": "c", "margin": "big"},
        "margin is 'big': give a finite number",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_pairs_are_one_sentence_with_their_place(case: str) -> None:
    values, sentence = BAD[case]
    with pytest.raises(UserError, match=f"^p.jsonl line 3: .*{sentence}"):
        list(preferred(Encoder(tokenizer()), [Record(values, "p.jsonl line 3")]))


def test_what_two_conversations_share_is_their_prompt() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    names = onward.Tokenizer(tokenizer().inner, templates={"default": template})
    talk = sums(2)[1]["messages"]
    other = [talk[0], {"role": "assistant", "content": "Eleven."}]
    for values in {"chosen": talk, "rejected": other}, {"prompt": talk[:1], "chosen": talk[1:], "rejected": other[1:]}:
        (example,) = preferred(Encoder(names), [Record(values, "")])
        texts = [names.decode([t for t, own in zip(s.tokens, s.trained) if own]) for s in example.sequences]
        assert texts == [talk[1]["content"], "Eleven."]


def test_judged_answers_come_with_an_answer_to_another_prompt() -> None:
    rows = [{"prompt": f"{i} ", "completion": f"{i}{i}", "label": i % 2 == 0} for i in range(3)]
    found = list(judged(Encoder(tokenizer()), [Record(row, "") for row in rows]))
    assert [tokenizer().decode(e.sequences[1].tokens) for e in found] == ["0 22", "1 00", "2 11"]
    assert [e.numbers["label"] for e in found] == [1, 0, 1]


def test_partners_of_pairs_and_mixed_rows_answer_another_prompt_of_the_same_kind() -> None:
    names = with_template(tokenizer(), "plain")
    say = lambda role, text: [{"role": role, "content": text}]
    rows: list[dict[str, Any]] = [{"prompt": f"{i}?", "chosen": f"is {i}", "rejected": f"is {i}{i}"} for i in range(3)]
    rows += [{"prompt": "0?", "completion": f"It is {i}", "label": i} for i in range(2)]
    rows[2:2] = [
        {"prompt": say("user", f"{i}?"), "completion": say("assistant", f"Be {i}"), "label": i} for i in range(2)
    ]
    rows += [
        {"chosen": say("user", "7?") + say("assistant", f"{i}"), "rejected": say("user", "7?") + say("assistant", "!")}
        for i in range(2)
    ]
    found = list(judged(Encoder(names), [Record(row, f"line {i}") for i, row in enumerate(rows)]))
    texts = [[names.decode(s.tokens) for s in one.sequences] for one in found]
    assert len(found) == 3 * 2 + 2 + 2 + 2 * 2
    answers = defaultdict(set)
    for own, _ in texts:
        answers[own.split("?")[0]].add(own.split("?")[1])
    for own, partner in texts:
        prompt, answer = partner.split("?")
        assert prompt == own.split("?")[0]
        assert ("User" in own) == ("Assistant" in answer), "the partner is of the same kind"
        assert answer not in answers[prompt]
        assert any(answer in several for several in answers.values())


@pytest.mark.parametrize("label", [5, -1, 0.5, "1"])
def test_a_label_is_1_or_0(label: Any) -> None:
    row = {"prompt": "2?", "completion": "3", "label": label}
    with pytest.raises(UserError, match=r"p.jsonl line 3: label is .*: give 1 or true for a wanted answer"):
        list(judged(Encoder(tokenizer()), [Record(row, "p.jsonl line 3")]))
