"""Several processes train one model on the same windows, in the same order, as one process does."""

import json
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from onward import Decoder, Run, RunConfig
from onward.checkpoint.saves.folder import saves
from onward.checkpoint.weights import read_tensors

from support.ranks import run_ranks
from support.runs import TINY, metrics

SETTINGS: dict[str, Any] = {"tokenizer": "char", "steps": 12, "batch_size": 2, "accumulation": 3, "precision": "fp32"}
SETTINGS |= {"device": "cpu", "validate_every": 4, "learning_rate": 1e-3, "average": 0.9}

PROGRAM = """
import atexit, json, os, sys
from pathlib import Path

def fail_if_threads_are_left():  # at Python's end one of a group's threads may abort the process
    names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").glob("*")]
    if any("gloo" in name for name in names):
        print(f"threads are left: {names}", file=sys.stderr, flush=True)
        os._exit(1)

atexit.register(fail_if_threads_are_left)
from onward.training.config import RunConfig
from onward.training.step.loss import CrossEntropy
from onward.training.run.run import Run

settings = json.loads(sys.argv[1])
harmful = settings.pop("harmful", None)
out, until = Path(settings["out"]), int(sys.argv[2])
new, size, numbers = settings.pop("new"), settings["batch_size"], []

def loss(model, batch):
    first = batch.seed  # of dropout: it is the number of the first window, as the run's seed is 0
    numbers.append((run.step, list(range(first, first + size))))
    if harmful == first:  # spoils the weights of one process
        model.embed.weight.data.fill_(float("nan"))
    return CrossEntropy()(model, batch)

run = Run.start(RunConfig(**settings), loss=loss) if new else Run.resume(out, loss=loss)
for event in run.train(lambda: run.step >= until):
    pass
with open(out / f"read-{until}-{run.processes.rank}.json", "w") as file:
    json.dump(numbers, file)
"""


def train(count: int, until: int, settings: dict[str, Any], folder: Path) -> dict[int, set[int]]:
    """Train up to a step with `count` processes; return the windows of each step."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    words = [str(program), json.dumps(settings), str(until)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
    done = subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen: dict[int, set[int]] = {}
    for rank in range(count):
        for step, numbers in json.loads((Path(settings["out"]) / f"read-{until}-{rank}.json").read_text()):
            seen.setdefault(step, set()).update(numbers)
    return seen


@pytest.mark.parametrize(
    ("mlp", "counts"),
    [pytest.param(mlp, (2, 3, 1), marks=pytest.mark.long) for mlp in ("gated", "experts(count=4, top_k=2, d_ff=16)")],
)
def test_number_of_processes_changes_neither_windows_nor_weights(
    mlp: str, counts: Sequence[int], story_file: Path, tmp_path: Path
) -> None:
    settings = SETTINGS | {"sources": [str(story_file)], "experts": "loop", "model": TINY | {"mlp": mlp}}
    alone, mixed = (settings | {"out": str(tmp_path / name)} for name in ("alone", "mixed"))
    whole = train(1, 12, alone | {"new": True}, tmp_path)
    ends = [4 * i for i in range(1, len(counts))] + [12]
    parts = [train(count, end, mixed | {"new": end == 4}, tmp_path) for count, end in zip(counts, ends)]
    for step in range(12):
        of_step = set().union(*(part.get(step, set()) for part in parts))
        assert whole[step] == of_step == {*range(step * 6, step * 6 + 6)}
    for one, other in zip(metrics(tmp_path / "alone"), metrics(tmp_path / "mixed"), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    names = "model.safetensors"
    first, second = (read_tensors(tmp_path / run / names) for run in ("alone", "mixed"))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_processes_roll_back_together(story_file: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"sources": [str(story_file)], "model": TINY, "new": True, "harmful": 38}  # of step 7
    for count in 1, 2:
        train(count, 12, settings | {"out": str(tmp_path / str(count))}, tmp_path)
    for one, other in zip(metrics(tmp_path / "1"), metrics(tmp_path / "2"), strict=True):
        assert one == other if "reason" in one else one == pytest.approx(other, rel=1e-4)
    (row,) = [row for row in metrics(tmp_path / "2") if "reason" in row]
    assert (row["step"], row["failed_step"], row["skipped"]) == (4, 7, [36, 42])


def finish(folder: Path) -> None:
    """Train a run to its end."""
    list(Run.resume(folder).train())


def difference(settings: dict[str, Any], model: Decoder, dtype: torch.dtype, folder: Path) -> float:
    """The maximum difference of a weight after training in one process and in two, in this dtype."""
    weights = []
    for count in 1, 2:
        config = RunConfig(**settings, out=str(folder / f"{dtype} {count}"))
        run = Run.start(config, model=deepcopy(model).to(dtype)).folder
        assert run_ranks(finish, run, count=count) == [None] * count
        weights.append(read_tensors(run / "model.safetensors"))
    one, two = weights
    assert {tensor.dtype for tensor in two.values()} == {dtype}
    return max((two[name] - tensor).abs().max().item() for name, tensor in one.items())


@pytest.mark.long
@pytest.mark.parametrize("steps", [8, 200])
def test_one_process_and_two_differ_only_by_rounding(steps: int, story_file: Path, tmp_path: Path) -> None:
    """A difference in the arithmetic would be equally large in fp64, whereas rounding errors are smaller by the ratio
    of the dtypes' eps."""
    settings = SETTINGS | {"sources": [str(story_file)], "model": TINY | {"n_layers": 1}, "accumulation": 4}
    settings |= {"steps": steps, "validate_every": steps, "learning_rate": 1e-2}
    first = Run.start(RunConfig(**settings, out=str(tmp_path / "first")))
    settings["tokenizer"] = str(first.folder)
    in_fp32, in_fp64 = (difference(settings, first.model, d, tmp_path) for d in (torch.float32, torch.float64))
    print(f"after {steps} steps weights differ by {in_fp32:.1e} in fp32 and by {in_fp64:.1e} in fp64")
    assert 1e-8 < in_fp32 < 1e-3
    assert 0 < in_fp64 < 1e-7 * in_fp32


def change_weight_at_step_3(folder: Path) -> None:
    """Train a run in which rank 1 changes one bit of a weight."""
    run = Run.resume(folder)
    bits = run.model.embed.weight.data.view(torch.int32)

    def change(*_: object) -> None:
        bits[0, 0] += run.step == 2 and run.processes.rank == 1

    run.trainer.optimizers[0].register_step_post_hook(change)
    list(run.train())


@pytest.mark.long
def test_ranks_are_compared_again_at_each_save(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(RunConfig(**SETTINGS, sources=(str(story_file),), model=TINY, out=str(tmp_path / "run")))
    for outcome in run_ranks(change_weight_at_step_3, run.folder):
        assert str(outcome).startswith("the ranks hold different runs: rank 1 differs from rank 0 in weights;")
    assert metrics(run.folder)[-1]["step"] == 4, "step 4 is the first to be saved after the change"
    assert [save.name for save in saves(run.folder)] == ["step-0000000"]


def train_for_two_seconds(story_file: Path, folder: Path) -> tuple[int, int, float, bool]:
    """The number of steps made, the number in run.json, the decay, and whether only the first process has a Budget."""
    settings = SETTINGS | {"steps": 0, "time": "2s", "validate_every": 0, "model": TINY, "out": str(folder)}
    run = Run.start(RunConfig(**settings, sources=(str(story_file),)))
    alone = (run.budget is not None) == (run.processes.rank == 0)
    list(run.train())
    recorded = json.loads((folder / "run.json").read_text())
    return run.step, recorded["steps"], recorded["decay"], alone


@pytest.mark.long
def test_processes_end_a_timed_run_at_the_same_step(story_file: Path, tmp_path: Path) -> None:
    one, other = run_ranks(train_for_two_seconds, story_file, tmp_path / "run")
    assert one == other
    step, steps, decay, alone = one
    assert 0 < step == steps
    assert 0 < decay <= steps
    assert alone
