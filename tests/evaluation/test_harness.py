"""lm-evaluation-harness with Onward's engine gives the same result for each question as the harness's own transformers
model."""

import json
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import LanguageModel
from onward.cli import main

from support.harness_tasks import task_file

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")
instance = pytest.importorskip("lm_eval.api.instance").Instance

TEXT = "The cat sat on the mat. One day a dog came to the park, and the cat ran home. "


@pytest.fixture(scope="module")
def pair(tiny_run: Path, lm: LanguageModel) -> tuple[Any, Any]:
    """The same folder loaded as harness models of Onward and of transformers."""
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


def few_questions(folder: Path, name: str) -> Path:
    rows = [{"question": f"The {word}", "choices": ["sat", "ran"], "answer": "sat"} for word in ("cat", "dog", "man")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return task_file(folder / "rows.jsonl", name)


def test_a_yaml_file_is_a_task(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"The {word}", "choices": ["sat", "on the mat"], "answer": 0} for word in ("cat", "dog")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task_file(tmp_path / "rows.jsonl", "mine")
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
    task_file(tmp_path / "rows.jsonl", "exam")
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


def test_the_library_s_own_command_knows_the_model(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import runpy

    few_questions(tmp_path, "mine")
    words = ["--model", "onward", "--model_args", f"path={tiny_run},quantize=int8", "--tasks", "mine", "--limit", "2"]
    monkeypatch.setattr("sys.argv", ["lm_eval", *words, "--include_path", str(tmp_path)])
    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager.__init__", partialmethod(lm_eval.tasks.TaskManager.__init__, include_defaults=False)
    )
    monkeypatch.setattr("lm_eval.__main__.setup_logging", lambda: None)
    runpy.run_module("onward.harness", run_name="__main__")
    assert "|mine|" in capsys.readouterr().out


def test_adapters_and_gguf_files_are_evaluated(tiny_run: Path, tmp_path: Path) -> None:
    from onward.harness import HarnessModel

    lm = onward.load(tiny_run)
    expected = HarnessModel(str(tiny_run)).loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    onward.save(lm, tmp_path / "model.gguf", dtype="f32")
    found = HarnessModel(str(tmp_path / "model.gguf")).loglikelihood(
        requests("loglikelihood", PAIRS), disable_tqdm=True
    )
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    torch.manual_seed(0)
    onward.add_lora(lm.model, onward.LoRA(rank=2))
    for name, parameter in lm.model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter.data)
    onward.save_adapter(lm, tmp_path / "adapter", tiny_run)
    ours = HarnessModel(lm).loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    adapted = HarnessModel(str(tiny_run), adapter_folder=str(tmp_path / "adapter"))
    assert adapted.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True) == ours
    assert ours != expected


FILES = {  # text of a .yaml file, expected message
    "task: bad\n  dataset_path: json\n": "bad.yaml, line 2: mapping values are not allowed here",
    "task: bad\ndataset_path: json\ndoc_to_txt: a\n": "line 3: doc_to_txt is not a field of a task: did you mean",
    "- a\n": "bad.yaml defines no task",
    "task: bad\ndataset_path: json\ndataset_kwargs: {data_files: {test: gone.jsonl}}\ntest_split: test\n": "gone.jsonl",
    "task: bad\ndataset_path: someone/questions\ntest_split: test\n": "because someone/questions",
}


@pytest.mark.parametrize("text", FILES)
def test_a_wrong_task_file_is_one_sentence_and_loses_no_other(text: str, tiny_run: Path, tmp_path: Path) -> None:
    from onward.harness import run_harness

    (tmp_path / "bad.yaml").write_text(text)
    tasks = [str(tmp_path / "bad.yaml"), str(few_questions(tmp_path, "good"))]
    found = run_harness(onward.load(tiny_run), tasks, examples=0, limit=2)
    assert [row["task"] for row in found.rows] == ["good"]
    (message,) = found.failures.values()
    assert FILES[text] in message
    assert "\n" not in message


def test_a_task_that_runs_programs_in_no_sandbox_is_refused(tiny_run: Path, tmp_path: Path) -> None:
    from onward.harness import run_harness

    file = few_questions(tmp_path, "programs")
    file.write_text(file.read_text() + "\nunsafe_code: true\n")
    found = run_harness(onward.load(tiny_run), [str(file), str(few_questions(tmp_path, "good"))], examples=0, limit=2)
    assert [row["task"] for row in found.rows] == ["good"]
    assert "use --tasks programs:FILE --run-code" in "".join(found.failures.values())


def test_without_the_library_its_command_is_named(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("onward.cli.commands.evaluate.find_spec", lambda name: None)
    assert main(["evaluate", str(tiny_run), "--tasks", "arc_easy"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.endswith("(lm-evaluation-harness, with its tasks: pip install 'onward[eval]')")


def test_a_broken_task_file_is_one_sentence(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.yaml").write_text("task: broken\n")
    assert main(["evaluate", str(tiny_run), "--tasks", f"{tmp_path / 'broken.yaml'},copying", "--limit", "2"]) == 2
    printed = capsys.readouterr()
    assert "copying" in printed.out
    assert "lm-evaluation-harness cannot run" in printed.err.splitlines()[-1]
