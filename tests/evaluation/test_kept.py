"""Stored answers: a repeated evaluation computes only missing answers, and uses no answers of another model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import onward
from onward import Kept, LanguageModel
from onward.evaluation import continuations, kept
from onward.evaluation.kept import kept_for

TASKS = "copying, brackets, answers(file='{rows}', tokens=4)"


@pytest.fixture
def lm(tiny_run: Path) -> LanguageModel:
    return onward.load(tiny_run)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"The {i} cat", "answer": "sat"}) + "\n" for i in range(5)))
    return path


class Stopped(Exception):
    pass


def test_an_interrupted_evaluation_goes_on(
    lm: LanguageModel, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuations, "ROWS", 8)
    tasks = TASKS.format(rows=rows)
    expected = lm.evaluate_tasks(tasks, limit=5)

    stops = [("brackets", 16), ("answers(rows.jsonl, tokens=4)", 3)]

    def stop(task: str, done: int, total: int) -> None:
        if stops[0] == (task, done):
            stops.pop(0)
            raise Stopped

    read = list[int]()
    monkeypatch.setattr(
        continuations, "read", lambda model, inputs, counts, inner=continuations.read: (
            read.append(len(inputs)), inner(model, inputs, counts)
        )[1]
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(Stopped):
            lm.evaluate_tasks(tasks, limit=5, kept=kept_for(lm.model, lm.text(), tmp_path / "answers"), progress=stop)
    (file,) = (tmp_path / "answers").iterdir()
    assert len(Kept(file).results) == 20 + 20 + 3
    last = kept_for(lm.model, lm.text(), tmp_path / "answers")
    assert lm.evaluate_tasks(tasks, limit=5, kept=last) == expected
    assert last.reused == 20 + 20 + 3
    assert sum(read) == 20 + 20, "each pair is read once"


def test_a_file_belongs_to_one_model_and_tokenizer(lm: LanguageModel, tmp_path: Path) -> None:
    files = [kept_for(lm.model, lm.text(), tmp_path).file]
    lm.model.norm.weight.data[0] += 1
    files.append(kept_for(lm.model, lm.text(), tmp_path).file)
    lm.tokenizer.end_ids = [3]
    files.append(kept_for(lm.model, lm.text(), tmp_path).file)
    lm.model.bfloat16()
    files.append(kept_for(lm.model, lm.text(), tmp_path).file)
    assert len({*files}) == 4
    lm.model.register_forward_hook(lambda *_: None)
    assert kept_for(lm.model, lm.text(), tmp_path).file is None


def test_broken_lines_are_skipped_and_ended(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    one = Kept(file)
    one.add([(("score", (1, 2), (3,)), [-1.5, True])])
    one.close()
    with open(file, "a") as stream:
        stream.write('3\n[1, 2]\n["a"]\n["key", "cut')
    two = Kept(file)
    two.add([(("answer", (1,), "x"), "text")])
    two.close()
    three = Kept(file)
    assert three.get("score", (1, 2), (3,)) == [-1.5, True]
    assert three.get("answer", (1,), "x") == "text"
    assert three.get("answer", (1,), "y") is None
    assert (len(three.results), three.reused) == (2, 2)


def test_a_result_of_another_form_is_computed_again(lm: LanguageModel) -> None:
    pair = continuations.Pair((1, 2), (3,))
    (expected,) = continuations.score_continuations(lm.model, [pair])
    broken = Kept()
    broken.add([(continuations.request(pair), "text")])
    assert continuations.score_continuations(lm.model, [pair], kept=broken) == [expected]


def test_the_folder_and_its_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LARGEST", 1000)
    monkeypatch.setattr(kept, "FOLDER", 2000)
    for i in range(6):
        one = Kept(tmp_path / f"{i}.jsonl")
        os.utime(tmp_path / f"{i}.jsonl", (i, i))
        for j in range(40):
            one.add([(("answer", (j,), ""), "x" * 20)])
        one.close()
        os.utime(tmp_path / f"{i}.jsonl", (i, i))
    assert all(file.stat().st_size <= 1001 for file in tmp_path.iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["3.jsonl", "4.jsonl", "5.jsonl"]


def test_a_folder_that_cannot_be_written_is_a_warning(lm: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(kept.NotKept, match="answers are not kept in"):
        assert Kept(tmp_path / "file" / "a.jsonl").get("score", 1) is None


@pytest.mark.long
def test_ctrl_c_says_how_to_go_on(tiny_run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onward", "evaluate", str(tiny_run), "--tasks", "copying", "--limit", "5000"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    run = lambda *words: subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=True)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not any(file.stat().st_size > 99 for file in tmp_path.glob("onward/answers/*")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "answers are kept in" in said
    again, plain = run(), run("--no-keep")
    assert "answers were reused" in again.stderr
    assert again.stdout == plain.stdout
