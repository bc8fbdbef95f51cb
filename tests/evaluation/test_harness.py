"""lm-evaluation-harness on our engine: per question what its own model for transformers computes."""

import json
from pathlib import Path
from typing import Any

import pytest

import onward
from onward.cli import main
from onward.language_model import LanguageModel

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")
instance = pytest.importorskip("lm_eval.api.instance").Instance

TEXT = "The cat sat on the mat. One day a dog came to the park, and the cat ran home. "


@pytest.fixture(scope="module")
def lm(tiny_run: Path) -> LanguageModel:
    return onward.load(tiny_run)


@pytest.fixture(scope="module")
def pair(tiny_run: Path, lm: LanguageModel) -> tuple[Any, Any]:
    """The same folder as a model of ours and of transformers."""
    from lm_eval.models.huggingface import HFLM

    from onward.harness import HarnessModel

    return HarnessModel(lm), HFLM(pretrained=str(tiny_run), device="cpu", batch_size=3, dtype="float32")


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


PAIRS = [
    ("The cat", " sat on"),
    ("The cat ", "sat on"),
    ("The cat", " sat on the mat"),
    ("", "The dog"),
    (TEXT * 3, " The cat"),
    ("One day\n", "a dog came"),
    ("x", " y"),
]


def test_log_likelihoods_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    ours, theirs = (model.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True) for model in pair)
    for (value, greedy), (expected, flag) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == flag


def test_rolling_log_likelihoods_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    texts = [(TEXT,), (TEXT * 4,), ("a",)]
    ours, theirs = (
        model.loglikelihood_rolling(requests("loglikelihood_rolling", texts), disable_tqdm=True) for model in pair
    )
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_written_answers_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    given = [
        ("The cat", {"until": ["."], "max_gen_toks": 8}),
        ("One day", {"until": ["e"], "max_gen_toks": 8, "do_sample": False}),
        (TEXT, {"max_gen_toks": 8}),
    ]
    ours, theirs = (model.generate_until(requests("generate_until", given), disable_tqdm=True) for model in pair)
    assert ours == theirs


def test_a_yaml_file_is_a_task(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"The {word}", "choices": ["sat", "on the mat"], "answer": 0} for word in ("cat", "dog")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.yaml").write_text(
        f"""\
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
    )
    assert (
        main(["evaluate", str(tiny_run), "--tasks", f"{tmp_path / 'mine.yaml'},copying", "--limit", "2", "--json"]) == 0
    )
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{\n") :])
    (row,) = found["harness"]
    assert (row["task"], row["metric"]) == ("mine", "acc")
    assert 0 <= row["score"] <= 1
    assert main(["evaluate", str(tiny_run), "--tasks", "no_such_task"]) == 2


def test_questions_that_were_trained_on_are_left_out(
    tiny_run: Path, story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = story_file.read_text()[300:400]
    new = "Some words that no story has, in an order of their own, and more of these"
    rows = [{"question": text, "choices": ["sat", "on the mat"], "answer": 0} for text in (known, new, "The cat")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "exam.yaml").write_text(
        f"""\
task: exam
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
    )
    words = ["evaluate", str(tiny_run), "--tasks", f"{tmp_path / 'exam.yaml'},copying", "--against", str(tiny_run)]
    assert main([*words, "--limit", "3", "--json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{\n") :])
    exam, copying = found["contamination"]
    assert (exam["task"], copying["task"]) == ("exam, acc", "copying")
    assert exam["score"] == pytest.approx(found["harness"][0]["score"])
    assert (exam["contaminated"], exam["too_short"], exam["questions_without"]) == (pytest.approx(1 / 3), 1, 2)
    assert exam["score_without"] in (0, 0.5, 1)
    assert copying["contaminated"] == 0


def test_a_broken_task_file_is_one_sentence(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.yaml").write_text("task: broken\n")
    assert main(["evaluate", str(tiny_run), "--tasks", f"{tmp_path / 'broken.yaml'},copying", "--limit", "2"]) == 2
    printed = capsys.readouterr()
    assert "copying" in printed.out
    assert "lm-evaluation-harness cannot run" in printed.err.splitlines()[-1]
