"""A run folder that was edited by hand resumes, or is refused with one sentence."""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from onward import Run, UserError
from onward.base.files import file_sha256
from onward.checkpoint.saves.folder import CHECKSUMS, PROGRESS, saves

from support.runs import config

VALUES: list[Any] = [None, "x", "", -1, 0, 0.5, 10**30, 1e30, float("nan"), [], [[]], [None], {}, {"x": 1}, True]
LINES = [b"[]\n", b"null\n", b"{\n", b"\xff\n", b"{}\n", b'{"step": null}\n', b'{"step": "1"}\n', b"\n", b"7\n"]


@pytest.fixture(scope="module")
def stopped_run(story_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run.start(config(story_file, tmp_path_factory.mktemp("runs") / "run", steps=6, validate_every=2))
    list(run.train(stop=lambda: run.step == 2))
    (run.folder / "samples.jsonl").write_text('{"step": 0, "text": ""}\n')
    return run.folder


def edit(folder: Path, random: Random) -> str:
    """Edit a file of a run; return its name."""
    name = random.choice(["inputs.json", "run.json", PROGRESS, "metrics.jsonl", "samples.jsonl"])
    path = saves(folder)[-1] / name if name == PROGRESS else folder / name
    if name.endswith(".jsonl"):
        path.write_bytes(random.choice(LINES) + path.read_bytes())
        return name
    table: Any = json.loads(path.read_text())
    key = random.choice(list(table))
    if random.random() < 0.2:
        del table[key]
    elif random.random() < 0.1:
        table = random.choice(VALUES)
    else:
        table[key] = random.choice(VALUES)
    path.write_text(json.dumps(table))
    if name == PROGRESS:
        sums = json.loads((path.parent / CHECKSUMS).read_text())
        (path.parent / CHECKSUMS).write_text(json.dumps(sums | {name: file_sha256(path)}))
    return name


def continued(folder: Path, *, training: bool) -> str:
    """Resume a run and, with `training`, train one step; return the message of a UserError, or ""."""
    try:
        run = Run.resume(folder)
        if training:
            next(iter(run.train()))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [40, pytest.param(2_000, marks=pytest.mark.long)])
def test_edited_run_goes_on_or_the_file_is_named(count: int, stopped_run: Path, tmp_path: Path) -> None:
    refused = 0
    for seed in range(count):
        shutil.copytree(stopped_run, folder := tmp_path / "run")
        name = edit(folder, Random(seed))
        # no training for run.json, which may request any size
        if sentence := continued(folder, training=name != "run.json"):
            refused += 1
            assert "\n" not in sentence
            named = name == "run.json" or name in sentence or "its inputs have changed" in sentence
            assert named, f"seed {seed}, {name}: {sentence}"
        shutil.rmtree(folder)
    assert refused > count / 3


@pytest.mark.parametrize("line", [line for line in LINES if line != b"\n"])
def test_broken_line_of_metrics_is_named(line: bytes, stopped_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stopped_run, tmp_path / "run")
    (folder / "metrics.jsonl").write_bytes(line + (folder / "metrics.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"metrics\.jsonl line 1 "):
        Run.resume(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"average": 0.5},
        {"precision": "fp16"},
        {"precision": "bf16"},
        {"optimizer": "muon"},
        {"optimizer": "torch.optim:SGD"},
        {"steps": 9},
    ],
    ids=str,
)
def test_settings_that_fit_the_saved_weights_can_be_changed(change: Any, stopped_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stopped_run, tmp_path / "run")
    settings = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(settings | change))
    run = Run.resume(folder)
    list(run.train())
    assert run.step == change.get("steps", 6)
    Run.resume(folder)  # reads what the changed run has saved
