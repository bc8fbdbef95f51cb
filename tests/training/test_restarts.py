"""A run whose processes are killed is started again by torchrun, resumes from its newest save, and ends with weights
that are bit-for-bit identical to those of an undisturbed run."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onward import Run, RunConfig

from support.ranks import Ranks
from support.runs import TINY, assert_same_run

SETTINGS: dict[str, Any] = {"tokenizer": "char", "steps": 12, "batch_size": 2, "accumulation": 2, "precision": "fp32"}
SETTINGS |= {"device": "cpu", "validate_every": 3, "learning_rate": 1e-2, "model": TINY}

PROGRAM = r"""
import json, os, random, signal, sys, threading, time
from pathlib import Path

settings, kills, pause = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
random.seed(attempt)
victim, pause = random.randrange(int(os.environ["WORLD_SIZE"])), random.uniform(0, pause)

def steps():
    rows = Path(settings["out"]) / "metrics.jsonl"
    return rows.read_bytes().count(b"learning_rate") if rows.exists() else 0

def die(before):
    while steps() < before + 4:  # a save has been made since
        time.sleep(0.002)
    time.sleep(pause)
    os.write(2, f"attempt {attempt} is killed\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)

if attempt < kills and victim == int(os.environ["RANK"]):
    threading.Thread(target=die, args=[steps()], daemon=True).start()

from onward.cli.shared.training import in_processes, run_command
from onward.training.config import RunConfig

sys.exit(in_processes(lambda: run_command(RunConfig(**settings), True)))
"""


def undisturbed(settings: dict[str, Any]) -> None:
    list(Run.start(RunConfig(**settings)).train())


def assert_survives(ranks: Ranks, count: int, kills: int, pause: float, settings: dict[str, Any], place: Path) -> None:
    """Assert that a run that is killed `kills` times equals an undisturbed run."""
    (place / "program.py").write_text(PROGRAM)
    ranks.run(undisturbed, settings | {"out": str(place / "whole")})
    words = ["--standalone", f"--nproc-per-node={count}", f"--max-restarts={kills}", "--monitor-interval=0.05"]
    program = [str(place / "program.py"), json.dumps(settings | {"out": str(place / "run")}), str(kills), str(pause)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, *program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # torchrun's report may name any one of the processes that failed together, so count the messages of PROGRAM
    killed = re.findall(r"attempt (\d+) is killed", done.stderr)
    assert [*map(int, killed)] == [*range(kills)], done.stderr
    assert_same_run(place / "whole", place / "run")


@pytest.mark.long
def test_killed_process_is_started_again(two: Ranks, story_file: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"sources": [str(story_file)], "mesh": "shard=2"}
    assert_survives(two, 2, 1, 0.0, settings, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "kills"), [("shard=2 tensor=2", 30), ("pipeline=2 shard=2", 4)])
def test_processes_killed_at_any_moment_end_with_the_same_weights(
    mesh: str, kills: int, four: Ranks, story_file: Path, tmp_path: Path
) -> None:
    settings = SETTINGS | {"sources": [str(story_file)], "mesh": mesh, "accumulation": 4, "steps": 400}
    assert_survives(four, 4, kills, 1.0, settings, tmp_path)
