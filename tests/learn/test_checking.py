"""onward learn --check: runs a reader's file in a separate process, and shows exercises on request."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.cli import main
from onward.learn import checking
from onward.learn.checking import Verdict, check_file, examine
from onward.learn.comparison import difference, same, short
from onward.learn.exercise import HEADER
from onward.learn.exercises import exercises

NAMED = {exercise.name: exercise for exercise in exercises()}
FILE = """\
import torch, sys
print("loading")

def top_k(logits, k):
    print("called")
    least = logits.sort(descending=True).values[:, :k].min(-1, keepdim=True).values
    return torch.where(logits < least, -torch.inf, logits)

def temperature(logits, t):
    return logits.softmax(-1) if t else sys.exit(3)

def repetition_penalty(logits, history):
    return logits

def top_p(logits, p):
    ordered, order = logits.sort(descending=True)
    drop = ordered.softmax(-1).cumsum(-1) > p  # not shifted
    return logits.masked_fill(drop.gather(-1, order), -torch.inf)  # gathered

def beam_step(scores, logprobs):
    return scored + logprobs
"""


def test_a_file_that_prints_and_exits_is_checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE, encoding="utf-8")
    assert main(["learn", "9", "--check", str(file), "--json"]) == 1
    out, err = capfd.readouterr()
    rows = {row["exercise"]: Verdict(**row) for row in json.loads(out)}
    assert "called" in err
    assert rows["top_k"].status == "passed"
    assert "ended its process with status 3" in rows["temperature"].what
    assert "takes 2 positional arguments but 3 were given" in rows["repetition_penalty"].got
    assert rows["beam_step"].got == "NameError: name 'scored' is not defined (line 21)"
    assert rows["top_p"].call.startswith("top_p(logits=(2, ")
    assert rows["top_p"].mistake.startswith("the token that reaches p is dropped")
    assert "; and gather with the order of the sort" in rows["top_p"].mistake


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("no.py", None, r"there is no file .*no\.py: --starter in place of --check"),
        ("mine.ipynb", "{}", "is not a Python file"),
        ("broken.py", "x = 1\ndef top_p(logits:\n", r"cannot be run: SyntaxError: .*\(broken\.py, line 2\)"),
        ("empty.py", "x = 1\ntop_p = 2\n", "has no exercise yet: write one of top_k, temperature"),
    ],
)
def test_a_file_that_cannot_be_checked_is_one_sentence(
    name: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert main(["learn", "9", "--check", str(tmp_path / name)]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert re.search(message, line)


def test_one_that_hangs_alone_in_its_process_fails_and_the_next_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    passed = {"exercise": "top_k", "chapter": 9, "status": "passed"}
    late: list[tuple[list[dict[str, Any]], int | None]] = [([{}, passed], None), ([{}], None), ([{}, passed], 0)]
    monkeypatch.setattr(checking, "run_apart", lambda *_, **__: late.pop(0))
    checked = [NAMED[name] for name in ("top_k", "top_p", "top_k")]
    before, hung, after = check_file(tmp_path / "mine.py", checked, seconds=7)
    assert (hung.exercise, hung.what) == ("top_p", "has not returned after 7 s: look for a loop without end")
    assert before.status == after.status == "passed"
    assert not late


def test_the_smallest_failing_case_is_shown() -> None:
    exercise = NAMED["merge"]
    verdict = examine(exercise, lambda tokens, pair, new: tokens, "")
    calls = [checking.called(exercise, case) for case in exercise.cases()]
    failing = [call for call, case in zip(calls, exercise.cases()) if exercise.answer(*case) != case[0]]
    assert verdict.what == f"fails in {len(failing)} of 20 cases"
    assert verdict.call == min(failing, key=len)


TABLE = torch.tensor([[1.0, 2.0], [3.0, -torch.inf]])


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (None, "returns nothing"),
        (TABLE.mT, "exchanged"),
        (-TABLE, "sign"),
        (TABLE * 3, "3 times"),
        (TABLE - TABLE, "NaN"),
        (TABLE.flatten(), "shape"),
        (TABLE.clamp(min=-1e9), "-torch.inf"),
        (TABLE + 1, ""),
        ("text", ""),
    ],
)
def test_a_difference_common_to_all_cases_is_named(got: Any, words: str) -> None:
    found = difference([TABLE, TABLE], [got, got])
    assert words in found
    assert bool(words) == bool(found)


def test_results_are_equal_whatever_holds_their_numbers() -> None:
    assert same((TABLE, 1), [TABLE.numpy(), torch.tensor(1.000001)])
    assert same([1, 2], torch.tensor([1, 2]))
    assert same(TABLE, [*TABLE])
    assert same((TABLE, TABLE), (TABLE.numpy(), [*TABLE.numpy()]))
    assert same(TABLE > 1, (TABLE > 1).tolist())
    assert not same(TABLE > 1, (TABLE > 1).int())
    assert not same(TABLE, TABLE + 0j)
    assert same(("a", "b"), ("a", "b"))
    assert not same(("a", "b"), ("b", "a"))
    assert not same(1.0, "a")
    assert not same(TABLE, TABLE[None])
    assert short((TABLE, 0.123456, [1, 2])) == "((2, 2) [[1, 2], [3, -inf]], 0.1235, [1, 2])"
    assert len(short(torch.zeros(1000))) < 220


def test_a_starter_file_has_the_exercises_and_overwrites_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    assert main(["learn", "9", "--starter", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert text.startswith(HEADER)
    assert all((one.starter in text) == (one.chapter == 9) for one in exercises())
    assert main(["learn", "--starter", str(file)]) == 2
    assert file.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--exercises", 0, "Top-p, nucleus sampling."),
        ("4 --exercises", 0, "attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor\n    Return the output"),
        ("--answer top_p", 0, "drop = before >= p\n"),
        ("9 --answer top", 2, "there is no exercise 'top' here: did you mean top_"),
        ("13 --exercises", 2, "chapter 13 has no exercises to check: choose a chapter of 1, 2, "),
        ("9 --json", 2, "--json is used only with --check"),
        ("9 --check a.py --answer top_p", 2, "--check and --answer cannot be combined: choose one"),
    ],
)
def test_exercises_and_answers_are_shown_on_request(
    words: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["learn", *words.split()]) == status
    assert message in "".join(capsys.readouterr())
