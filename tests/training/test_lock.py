"""One process at a time works in a run folder."""

import fcntl
import gc
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from onward import Run, UserError
from onward.base.files import read_json, write_json
from onward.cli import main
from onward.training.run.lock import LOCK, Hold, is_running, keeping, of_this_job, run_lock

from support.runs import config


def test_run_folder_is_locked_from_the_start_to_the_end_of_the_training(story_file: Path, tmp_path: Path) -> None:
    with keeping():
        run = Run.start(config(story_file, tmp_path / "run", steps=4, validate_every=2))
    assert is_running(run.folder)
    events = run.train(stop=lambda: run.step == 2)
    next(events)
    assert is_running(run.folder)
    with pytest.raises(UserError, match="another process trains in"):
        Run.resume(run.folder)
    list(events)
    assert not is_running(run.folder)
    assert list(Run.resume(run.folder).train())


def test_second_process_cannot_train_in_a_locked_folder(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=4))
    other = Run.resume(run.folder)
    events: Any = run.train()
    next(events)
    with pytest.raises(UserError, match="another process trains in"):
        next(other.train())
    events.close()
    assert not is_running(tmp_path)


def test_run_that_another_process_has_trained_meanwhile_is_not_continued(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=4))
    list(run.train(stop=lambda: run.step == 2))
    (run.folder / LOCK).write_text("process 7 on there, started then")
    with pytest.raises(UserError, match="process 7 on there, started then, has trained in"):
        next(iter(run.train()))


JOBS = [("eight", "text", True), ("eight", "other", False), ("nine", "text", False), ("none", "text", False)]


@pytest.mark.parametrize(("job", "word", "same"), JOBS)
def test_a_job_is_recognized_by_its_name_and_its_command(
    job: str, word: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(job: str, word: str) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        monkeypatch.setattr(sys, "argv", ["onward", "train", word])

    begin("none" if job == "none" else "eight", "text")
    with run_lock(tmp_path):
        begin(job, word)
    assert of_this_job(tmp_path) == same


ONWARD = [sys.executable, "-m", "onward", "train"]
SMALL = "--tokenizer char --batch-size 2 --precision fp32 --device cpu --validate-every 10 --model.d-model 16"
SMALL += " --model.n-layers 1 --model.n-heads 2 --model.context-length 16"


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size) and time.monotonic() < until:
        time.sleep(0.01)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error message of a failing command."""
    capsys.readouterr()
    assert main(["train", *words]) == 2
    return capsys.readouterr().err


def test_second_start_into_one_folder_names_the_process_that_started_first(
    story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["--out", str(run), "--steps", "2", *SMALL.split()]
    with subprocess.Popen([*ONWARD, "-", *words], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as first:
        wait_for(run / LOCK)  # the run waits for its text on standard input
        assert f"another process trains in {run} (process {first.pid} on " in refusal(capsys, str(story_file), *words)
        first.communicate(story_file.read_bytes())
    assert first.returncode == 0
    assert "already contains a run" in refusal(capsys, str(story_file), *words)


@pytest.mark.long
def test_a_process_refused_between_start_and_training_does_not_end_the_run(story_file: Path, tmp_path: Path) -> None:
    with keeping():
        run = Run.start(config(story_file, tmp_path / "run", steps=4, validate_every=2))
    named = (run.folder / LOCK).read_text()
    words = ["--out", str(run.folder), "--steps", "2", *SMALL.split()]
    other = lambda: subprocess.run([*ONWARD, str(story_file), *words], capture_output=True, text=True).stderr
    assert f"another process trains in {run.folder} (process {os.getpid()} on " in other()
    list(run.train(stop=lambda: run.step == 2))
    assert not is_running(run.folder)
    assert "already contains a run" in other()
    assert (run.folder / LOCK).read_text() == named, "a process that is refused leaves no name"
    assert list(run.train())


def test_a_run_of_a_mesh_goes_on_in_one_process_as_printed(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=4, validate_every=2)).folder
    options = read_json(run / "run.json")
    for mesh in "shard=2", "tensor=2 replicate=2":
        write_json(run / "run.json", options | {"mesh": mesh})
        assert Run.resume(run).processes.count == 1
        with pytest.raises(UserError, match="takes 2 processes, but there is 1"):
            Run.resume(run, mesh="shard=2")


def test_lock_ends_with_the_run_that_holds_it(story_file: Path, tmp_path: Path) -> None:
    folder = Run.start(config(story_file, tmp_path / "run", steps=4)).folder
    assert not is_running(folder), "a program may leave the training to another process"
    with keeping():
        run = Run.resume(folder)
    assert is_running(folder)
    del run
    gc.collect()
    assert not is_running(folder)


def test_asking_whether_a_run_runs_never_refuses_one(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("w") as asker, ThreadPoolExecutor() as threads:
        fcntl.flock(asker, fcntl.LOCK_SH)
        begun = threads.submit(Hold, tmp_path)
        with pytest.raises(TimeoutError):
            begun.result(timeout=0.1)
        fcntl.flock(asker, fcntl.LOCK_UN)
        assert begun.result(timeout=10)
        assert is_running(tmp_path)


@pytest.mark.long
def test_second_resume_names_the_first_whose_lock_dies_with_it(
    story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=100_000, validate_every=50_000)).folder
    with subprocess.Popen([*ONWARD, "--resume", str(run)], stderr=subprocess.DEVNULL) as first:
        wait_for(run / "metrics.jsonl")
        before = (run / "metrics.jsonl").read_bytes()
        assert f"(process {first.pid} on " in refusal(capsys, "--resume", str(run))
        assert (run / "metrics.jsonl").read_bytes().startswith(before), "the second process has removed no rows"
        first.kill()
    assert not is_running(run)
    assert Run.resume(run).step == 0
