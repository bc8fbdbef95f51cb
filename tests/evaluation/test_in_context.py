"""In-context learning: probabilities match those of separate model calls, for several kinds of prompts."""

import json
import math
from pathlib import Path

import pytest
import torch

from onward import LanguageModel
from onward.cli import main
from onward.evaluation import alternatives, shots_of

PROMPTS: dict[str, tuple[str, list[str], str, str, tuple[str, ...], str]] = {
    # prompt, further examples, separator; expected question, examples, separator
    "semicolons": ("a → b; c → d; e →", [], "", "e →", ("a → b", "c → d"), "; "),
    "lines": ("a; b: c\nd:", [], "", "d:", ("a; b: c",), "\n"),
    "examples of a file come first": ("c → d; e → ", ["a → b"], "", "e →", ("a → b", "c → d"), "; "),
    "a question alone": ("e →", ["a → b"], "", "e →", ("a → b",), "\n"),
    "a separator of the user": ("a=b | c=", [], " | ", "c=", ("a=b",), " | "),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_examples_and_a_question(name: str) -> None:
    prompt, examples, separator, *expected = PROMPTS[name]
    shots = shots_of(prompt, examples, separator)
    assert [shots.question, shots.examples, shots.separator] == expected
    assert shots.text(0) == shots.question
    assert shots.text(len(shots.examples)) == shots.separator.join([*shots.examples, shots.question])


def test_the_nearest_examples_are_added_first() -> None:
    shots = shots_of("c; d; q", ["a", "b"])
    assert shots.counts == (0, 1, 2, 4)
    assert [shots.text(count) for count in (1, 2)] == ["d; q", "c; d; q"]
    assert shots_of("q", list("abcdefghi")).counts == (0, 1, 2, 4, 8, 9)
    assert shots_of("q").counts == (0,)


@torch.no_grad()
def probabilities(lm: LanguageModel, text: str) -> torch.Tensor:
    tokens = lm.text().begin(lm.text().encode(text))
    return lm.model(torch.tensor([tokens]))[0, -1].double().softmax(-1)


def test_next_tokens_have_the_probabilities_of_the_model(lm: LanguageModel) -> None:
    shots = shots_of("The cat sat; A dog slept; The old", ["The cat sang"])
    found = alternatives(lm.model, lm.text(), shots, top=5)
    assert found.counts == (0, 1, 2, 3)
    columns = [probabilities(lm, shots.text(count)) for count in found.counts]
    by_piece = {lm.text().piece(i): [float(column[i]) for column in columns] for i in range(len(columns[0]))}
    for answer, row in zip(found.answers, found.probabilities, strict=True):
        assert row == pytest.approx(by_piece[answer], abs=1e-6)
    best = sorted(by_piece, key=lambda piece: -max(by_piece[piece]))[:5]
    assert set(found.answers) == set(best)
    assert [row[-1] for row in found.probabilities] == sorted((row[-1] for row in found.probabilities), reverse=True)


def test_candidates_have_the_probability_of_all_their_tokens(lm: LanguageModel) -> None:
    shots = shots_of("The cat sat; A dog")
    found = alternatives(lm.model, lm.text(), shots, candidates=["slept on the mat", "sang", "sang"])
    assert sorted(found.answers) == ["sang", "slept on the mat"]
    for answer, row in zip(found.answers, found.probabilities):
        for count, value in zip(found.counts, row):
            assert value == pytest.approx(
                math.exp(lm.score(shots.text(count) + " " + answer).total - lm.score(shots.text(count)).total), rel=1e-4
            )


def test_whole_answers_end_before_the_separator(lm: LanguageModel) -> None:
    shots = shots_of("The cat sat\nA dog sang\nThe old", separator="\n")
    found = alternatives(lm.model, lm.text(), shots, max_new_tokens=6, top=3)
    assert 0 < len(found.answers) <= 3
    for answer, row in zip(found.answers, found.probabilities):
        assert answer == answer.strip() != ""
        assert "\n" not in answer
        assert row[-1] == pytest.approx(
            math.exp(lm.score(f"{shots.text(2)} {answer}").total - lm.score(shots.text(2)).total), rel=1e-4
        )


def test_the_command_prints_draws_and_repeats(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lm: LanguageModel
) -> None:
    file = tmp_path / "shots.csv"
    file.write_text("question,answer\nThe cat,sat\nA dog,slept\n")
    words = ["prompt", str(tiny_run), "A dog sang; The cat", "--examples", str(file), "--top", "4"]
    for ending in "svg", "png", "html":
        assert main([*words, "--out", str(tmp_path / f"p.{ending}")]) == 0
        assert (tmp_path / f"p.{ending}").stat().st_size > 500
    assert "3 examples" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["examples"] == ["The cat sat", "A dog slept", "A dog sang"]
    assert printed["counts"] == [0, 1, 2, 3]
    assert len(printed["answers"]) == len(printed["probabilities"]) == 4
    assert main([*words, "--candidates", "sat, slept", "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["answers"]) == ["sat", "slept"]
    assert "with 3 examples" in (tmp_path / "p.svg").read_text()


WRONG: dict[str, tuple[list[str], str]] = {
    "a prompt that ends with its separator": (["a → b; "], "ends with its separator"),
    "an empty prompt": ([" "], "ends with its separator"),
    "no such file": (["The cat", "--examples", "absent.jsonl"], "absent.jsonl"),
    "another picture": (["The cat", "--out", "p.gif"], "Cannot write p.gif"),
    "a theme without a picture": (["The cat", "--theme", "dark"], "theme"),
    "two kinds of answers": (
        ["The cat", "--candidates", "sat", "--max-new-tokens", "3"],
        "with --candidates, which lists them",
    ),
    "candidates without an answer": (["huge →", "--candidates", " , "], "candidates is ' , ', which has no answer"),
    "too many examples": (["; ".join(["The cat sat on the mat"] * 12)], "give at most"),
    "a question that is too long": (["The cat sat on the mat " * 9], "shorten the question"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_prompt_is_one_sentence(name: str, tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG[name]
    assert main(["prompt", str(tiny_run), *words]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("onward: ")
    assert message in last


def test_more_top_tokens_than_the_vocabulary_are_all_of_it(lm: LanguageModel) -> None:
    found = alternatives(lm.model, lm.text(), shots_of("The cat"), top=10**6)
    # tokens with the same text are listed once
    assert sum(row[0] for row in found.probabilities) == pytest.approx(1, abs=0.05)
