"""A run that is killed at any moment and resumed equals a run that was never stopped."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from onward import Run
from onward.checkpoint.saves.folder import saves

from support.runs import TINY, assert_same_run, config

STEPS = 400
SETTINGS: dict[str, Any] = {"steps": STEPS, "validate_every": 5, "average": 0.99}
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp16, muon, packed": {"precision": "fp16", "optimizer": "muon", "pack": "documents"},
    "experts, recomputed, accumulated": {
        "experts": "loop",
        "recompute": True,
        "accumulation": 2,
        "batch_size": 2,
        "model": TINY | {"mlp": {"kind": "experts", "count": 4, "top_k": 2, "d_ff": 16}},
    },
}


def size(folder: Path) -> int:
    """The size of a run's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def saving(folder: Path) -> bool:
    """Whether a save is being written."""
    return any((folder / "checkpoints").glob(".step-*"))


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_run_killed_twenty_times_equals_one_never_stopped(name: str, story_file: Path, tmp_path: Path) -> None:
    settings = SETTINGS | RUNS[name]
    list(Run.start(config(story_file, tmp_path / "whole", **settings)).train())
    run, moments, kills, amid = tmp_path / "run", random.Random(name), 0, 0
    Run.start(config(story_file, run, **settings))
    resume = f"list(Run.resume(Path({str(run)!r})).train())"
    program = f"from pathlib import Path; from onward.training.run.run import Run; {resume}"
    while int(saves(run)[-1].name.removeprefix("step-")) < STEPS:
        before = size(run)
        with subprocess.Popen([sys.executable, "-c", program]) as process:
            while process.poll() is None and size(run) <= before:
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.15))
            if kills % 2:  # in the middle of a save
                while process.poll() is None and not saving(run):
                    pass
            if kills < 20 and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                kills += 1
                amid += saving(run)
    assert kills == 20
    assert amid >= 5
    assert_same_run(run, tmp_path / "whole")
    assert not saving(run), "the unfinished saves of killed processes are removed"
