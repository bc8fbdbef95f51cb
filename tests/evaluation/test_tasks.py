"""Tasks: right answers agree with an independent rule, scores with a calculation by hand; wrong files and names give
one sentence."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import onward
from onward import Kept, LanguageModel, Task, UserError
from onward.cli import main
from onward.evaluation import Question, bootstrap, holm, mcnemar
from onward.evaluation.significance import smallest_difference
from onward.evaluation.tasks import tasks_of
from onward.evaluation.tasks.files import Answers

PLURALS = ["cat", "dog", "tree", "house", "bird", "river", "stone", "cloud", "road", "boat"]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 2,000 random nouns, in singular and plural."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("books") / "book.txt"
    path.write_text(" ".join(rng.choice(PLURALS) + rng.choice(["", "s"]) for _ in range(2000)), encoding="utf-8")
    return path


def closes(question: Question) -> str:
    stack = []
    for bracket in question.context.split():
        if bracket in "([{<":
            stack.append(bracket)
        else:
            stack.pop()
    return {"(": ")", "[": "]", "{": "}", "<": ">"}[stack[-1]]


def copied(question: Question) -> str:
    words = question.context.split()
    return words[words.index(words[-1]) + 1]


def mapped(question: Question) -> str | None:
    *lines, asked = question.context.split("\n")
    shown = dict(line.split(": ") for line in lines)
    return shown.get(asked.removesuffix(":"))


RULES: dict[str, Callable[[Question], str | None]] = {  # functions that find the right answer independently
    "copying": copied,
    "copying(words=4)": copied,
    "brackets": closes,
    "brackets(length=3)": closes,
    "arithmetic": lambda question: str(eval(question.context.removesuffix("="))),
    "arithmetic(digits=3)": lambda question: str(eval(question.context.removesuffix("="))),
    "mapping(shots=4)": mapped,
    "mapping(shots=8)": mapped,
    "mapping(shots=2)": mapped,
    "words:{book}": lambda question: question.context.split("\n")[-1].removesuffix(":") + "s",
    "cloze:{book}": lambda question: None,
}


@pytest.mark.parametrize("name", RULES)
def test_the_answer_of_a_question_is_right(name: str, book: Path) -> None:
    (task,) = tasks_of(name.format(book=book))
    questions = task.questions(40)
    assert questions == task.questions(40), "the same at each call"
    assert 30 < len(questions) <= 40
    text = book.read_text("utf-8")
    for question in questions:
        assert len(set(question.choices)) == len(question.choices) == 4
        right = question.choices[question.answer]
        expected = RULES[name](question)
        assert expected is None or right.strip() == expected
        if name.startswith("cloze"):
            assert [question.context + choice in text for choice in question.choices].count(True) == 1
            assert question.context + right in text


def test_a_mapping_is_five_tasks_with_more_and_more_examples() -> None:
    tasks = tasks_of("mapping, brackets")
    assert [task.label for task in tasks[:5]] == [f"mapping, {count} examples" for count in (0, 1, 2, 4, 8)]
    assert tasks[0].questions(1)[0].context.count(":") == 1
    assert tasks[5].label == "brackets"


class Fixed(Task, kind="fixed"):
    """Ten questions with two choices each; the first choice is right."""

    def questions(self, count: int) -> list[Question]:
        return [Question(f"{i} the cat", (" sat", " on the mat and then"), 0) for i in range(min(10, count))]


def test_a_score_is_the_share_of_likeliest_choices(lm: LanguageModel) -> None:
    (found,) = lm.evaluate_tasks([Fixed()], examples=2, limit=6)
    shots = "0 the cat sat\n1 the cat sat\n"
    for right, i in zip(found.right, range(2, 8), strict=True):
        totals = []
        for choice in " sat", " on the mat and then":
            text, count = f"{shots}{i} the cat{choice}", len(lm.text().encode(choice, special=False))
            tokens = lm.text().encode(text)[-33:]
            values = lm.model(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)[-count:]
            totals.append(sum(float(row[token]) for row, token in zip(values, tokens[-count:])))
        assert right == (totals[0] > totals[1])
    mean = sum(found.right) / 6
    assert found.score == mean
    assert found.error == pytest.approx(math.sqrt(mean * (1 - mean) / 5))
    assert (found.chance, found.examples, found.questions) == (0.5, 2, 6)


MATCHES = {
    ("exact", "4"): {" 4 ": True, "five": False, "4.0": False},
    ("contains", "Oslo"): {"in oslo.": True, "Rome": False},
    ("number", "1,200"): {"it is 1200.0": True, "2 or 3": False, "none": False},
    ("regex", "[ab]+"): {" abba": True, "abc": False},
}


@pytest.mark.parametrize(("match", "expected"), MATCHES)
def test_written_answers_are_compared(match: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "q", "answer": expected}) + "\n")
    task = Answers(file=str(file), match=match)  # type: ignore[arg-type]
    (question,) = task.questions(9)
    for answer, right in MATCHES[match, expected].items():
        assert task.grades([[answer]], [question], Kept()) == [float(right)], answer
    assert question.solved == f"q {expected}"


FILES: dict[str, tuple[str, str, str]] = {  # file name, text, expected message
    "no such file": ("absent", "", "cannot be read"),
    "empty": ("a.jsonl", " \n", "is empty"),
    "no JSON": ("a.jsonl", "{", "a.jsonl, line 1 is not JSON"),
    "no object": ("a.jsonl", "[1]", "line 1 is not an object"),
    "no answer": ("a.jsonl", '{"question": "q", "choices": ["a", "b"]}', "line 1 lacks answer"),
    "a wrong answer": (
        "a.jsonl",
        '{"question": "q", "choices": ["a", "b"], "answer": "c"}',
        "'c' is not among its choices",
    ),
    "one choice": ("a.jsonl", '{"question": "q", "choices": ["a"], "answer": "a"}', "a list of two texts"),
    "no rows": ("a.csv", "question,choices,answer\n", "has no rows"),
    "a JSON number": ("a.json", "3", "cannot be read"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_named(name: str, tmp_path: Path) -> None:
    file, text, message = FILES[name]
    if file != "absent":
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=message):
        tasks_of(f"choices:{tmp_path / file}")[0].questions(3)


ANSWERS = {"as text": "two", "as index": 1, "as letter": "B"}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_right_choice_is_a_text_an_index_or_a_letter(kind: str, tmp_path: Path) -> None:
    row = {"question": "q", "choices": ["one", "two"], "answer": ANSWERS[kind]}
    (tmp_path / "a.json").write_text(json.dumps([row]))
    (tmp_path / "a.csv").write_text(f"question,choices,answer\nq,one|two,{ANSWERS[kind]}\n")
    for file in "a.json", "a.csv":
        (question,) = tasks_of(f"choices:{tmp_path / file}")[0].questions(3)
        assert question == Question("q", (" one", " two"), 1)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_differences_change_their_sign_with_the_order(pairs: list[tuple[bool, bool]]) -> None:
    one, other = [a for a, _ in pairs], [b for _, b in pairs]
    found, back = bootstrap(one, other, rounds=50), bootstrap(other, one, rounds=50)
    assert (found.mean, found.low, found.high) == pytest.approx((-back.mean, -back.high, -back.low))
    assert mcnemar(one, other) == mcnemar(other, one)
    assert found.low <= found.mean + 1e-12
    assert found.mean <= found.high + 1e-12


def test_p_values_are_those_of_the_binomial_distribution() -> None:
    one, other = [True] * 9 + [False] * 11, [False] * 8 + [True] + [False] * 10 + [True]
    assert mcnemar(one, other) == pytest.approx(2 * (1 + 9) / 2**9)
    assert mcnemar(one, one) == 1
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert smallest_difference([1, 0, 1, 0], [0, 0, 0, 0]) == pytest.approx(
        (1.959964 + 0.841621) * math.sqrt(1 / 3) / 2
    )


def test_two_models_are_compared_question_by_question(
    tiny_run: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lm: LanguageModel
) -> None:
    other = tmp_path / "other"
    onward.save(LanguageModel(onward.Decoder(lm.config), lm.tokenizer), other)
    words = [
        "evaluate",
        str(tiny_run),
        str(other),
        "--tasks",
        f"cloze(file='{book}', before=9, after=2), copying",
        "--limit",
        "20",
        "--json",
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    right = found["right"]
    assert [row["task"] for row in found["results"]] == ["cloze(book.txt, before=9, after=2)", "copying"] * 2
    for row in found["differences"]:
        ours, theirs = (right[str(model)][row["task"]] for model in (tiny_run, other))
        assert row["difference"] == pytest.approx((sum(theirs) - sum(ours)) / 20)
        assert row["low"] <= row["difference"] <= row["high"]
        assert row["more_than_noise"] == (row["p"] < 0.05)
    assert main([word for word in words if word != "--json"]) == 0
    assert "score minus that of" in capsys.readouterr().out


def test_a_task_that_fails_does_not_lose_the_others(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tiny_run), "--tasks", "cloze:absent.txt, brackets", "--limit", "5"]) == 2
    printed = capsys.readouterr()
    assert "brackets" in printed.out
    assert "1 of 2 tasks failed, such as cloze(absent.txt)" in printed.err.splitlines()[-1]


WRONG = {
    "cloz:a.txt": "did you mean cloze",
    "arithmetic(digit=2)": "did you mean",
    "arithmetic(digits=0)": "digits is 0",
    "brackets:x": "length",
    "absent.yaml": "Cannot find the task file absent.yaml",
}


@pytest.mark.parametrize("tasks", WRONG)
def test_a_wrong_task_is_one_sentence(tasks: str, tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tiny_run), "--tasks", tasks]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("onward: ")
    assert WRONG[tasks] in last


@pytest.mark.parametrize("words", [["--examples", "3"], ["--tasks", "copying", "--stride", "4"]])
def test_an_option_that_is_not_read_is_refused(words: list[str], tiny_run: Path, story_file: Path) -> None:
    assert main(["evaluate", str(tiny_run), *words]) == 2
