"""Several processes that fail: one sentence with the rank and the cause, and one line of each other process."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from onward.training.run import Run

from support.runs import config, metrics

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAIN = f"{shlex.quote(sys.executable)} -m onward train"


def reports(stderr: str) -> list[str]:
    """Our lines, sorted; torchrun has a traceback of its own, and no other is there."""
    assert stderr.count("Traceback (most recent call last)") <= 1, stderr
    return sorted(line for line in stderr.splitlines() if line.startswith("onward: "))


@pytest.mark.long
def test_failure_of_one_rank_is_one_sentence_and_a_line_of_the_other(tmp_path: Path) -> None:
    words = ["-m", "onward", "train", "missing.txt", "--accumulation", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run([*LAUNCH, *words], capture_output=True, text=True, cwd=tmp_path)
    first, *others = reports(done.stderr)
    assert first.startswith("onward: rank 0: missing.txt does not exist")
    assert others in ([], ["onward: rank 1 ended because rank 0 ended"])  # torchrun may end rank 1 before it says so
    assert done.stderr.count("missing.txt does not exist") == 2, "torchrun shows it as the cause"
    assert not (tmp_path / "run").exists()


def at_step(run: Run, step: int) -> bool:
    return run.step == step


@pytest.mark.long
def test_ranks_with_different_runs_do_not_train(story_file: Path, tmp_path: Path) -> None:
    for rank, steps in enumerate((4, 2)):
        run = Run.start(config(story_file, tmp_path / str(rank), steps=30, validate_every=2, accumulation=2))
        list(run.train(stop=partial(at_step, run, steps)))
    command = f"exec {TRAIN} --resume {shlex.quote(str(tmp_path))}/$RANK"
    done = subprocess.run([*LAUNCH, "--no-python", "sh", "-c", command], capture_output=True, text=True)
    assert "rank 1 differs from rank 0 in step and weights" in "".join(reports(done.stderr))
    assert metrics(tmp_path / "0")[-1]["step"] == 4


@pytest.mark.long
def test_killed_rank_is_named_by_the_other(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=100_000, validate_every=50_000, accumulation=2)).folder
    command = f"echo $$$$ > {shlex.quote(str(tmp_path))}/pid$RANK; exec {TRAIN} --resume {shlex.quote(str(run))}"
    words = [*LAUNCH, "--no-python", "sh", "-c", command]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as launched:  # of which $$$$ is the $$ of sh
        rows, until = run / "metrics.jsonl", time.monotonic() + 60
        while not (rows.exists() and rows.stat().st_size) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
        assert launched.stderr
        said = launched.stderr.read()
    (report,) = reports(said)
    assert report.startswith("onward: rank 1 was killed")


def test_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        words = [sys.executable, "-m", "onward", "train", "embedded", "--out", str(tmp_path / "run")]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | place | ranks)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"the processes cannot meet at 127.0.0.1:{place['MASTER_PORT']}" in done.stderr
