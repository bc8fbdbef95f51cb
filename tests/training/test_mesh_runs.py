"""Runs on a mesh: equal to one process, resumed on any other mesh, exact on the same one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.checkpoint.saves.folder import damage, saves
from onward.checkpoint.weights import read_tensors
from onward.config.decoder import Experts
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.run.run import Run

from support.ranks import Ranks
from support.runs import TINY, metrics

SETTINGS: dict[str, Any] = {"tokenizer": "char", "steps": 8, "batch_size": 2, "accumulation": 4, "precision": "fp32"}
SETTINGS |= {"device": "cpu", "validate_every": 2, "learning_rate": 1e-2, "average": 0.9, "experts": "loop"}
MODEL = TINY | {"dropout": 0.0, "mlp": Experts(count=4, top_k=2, d_ff=16), "tied": True}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def train(out: Path, settings: dict[str, Any], until: int = 8, mesh: str = "") -> list[str]:
    """Train a run in fp64 up to a step; it is started if it is not there yet. Returns the names of its events."""
    if (out / "run.json").exists():
        run = Run.resume(out, mesh=mesh)
    else:
        config = RunConfig(**settings, out=str(out), mesh=mesh)
        torch.manual_seed(0)
        vocabulary = Tokenizer.load(Path(config.tokenizer)).vocab_size
        run = Run.start(config, model=Decoder(config.decoder(vocabulary)).double())
    return [type(event).__name__ for event in run.train(lambda: run.step >= until)]


@pytest.fixture(scope="module")
def settings(story_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a run, with a tokenizer and texts that are prepared already."""
    folder = tmp_path_factory.mktemp("first")
    first = Run.start(RunConfig(**SETTINGS, sources=(str(story_file),), model=MODEL, out=str(folder / "run")))
    return SETTINGS | {"sources": [str(story_file)], "model": MODEL, "tokenizer": str(first.folder)}


@pytest.fixture(scope="module")
def alone(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    train(out, settings)
    return out


def assert_equal_but_for_rounding(one: Path, other: Path) -> None:
    """Two runs in fp64 have the same log and the same averaged weights, up to 1e-9 of the largest value."""
    for a, b in zip(metrics(one), metrics(other), strict=True):
        shared = a.keys() & b.keys()  # layers of a divided model are not measured
        assert {k: a[k] for k in shared} == pytest.approx({k: b[k] for k in shared}, rel=1e-8, abs=1e-9)
    first, second = (read_tensors(run / "model.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == torch.float64
        assert (tensor - second[name]).abs().max() <= 1e-9 * tensor.abs().max().clamp(min=1), name


def test_saves_move_between_meshes(settings: dict[str, Any], alone: Path, two: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    two.run(train, run, settings, 2, "shard=2")
    two.run(train, run, settings, 4, "tensor=2")
    train(run, settings, 6, "replicate=1")
    two.run(train, run, settings, 8, "replicate=2")
    assert_equal_but_for_rounding(alone, run)
    assert not any(map(damage, saves(run)))


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["shard=4", "replicate=2 shard=2", "shard=2 tensor=2", "tensor=4"])
def test_saves_move_to_four_processes(
    mesh: str, settings: dict[str, Any], alone: Path, two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    run, changed = tmp_path / "run", settings | {"model": MODEL | {"n_kv_heads": 1}}
    train(tmp_path / "alone", changed)
    train(run, changed, 2, "replicate=1")
    two.run(train, run, changed, 4, "shard=2")
    four.run(train, run, changed, 6, mesh)
    train(run, changed, 8, "replicate=1")
    assert_equal_but_for_rounding(tmp_path / "alone", run)


@pytest.mark.parametrize("mesh", ["shard=2", pytest.param("tensor=2", marks=pytest.mark.long)])
def test_the_same_mesh_resumes_bit_for_bit(mesh: str, settings: dict[str, Any], two: Ranks, tmp_path: Path) -> None:
    options = settings | {"optimizer": "muon", "average": 0.0}
    two.run(train, tmp_path / "whole", options, 8, mesh)
    for until in 3, 8:
        two.run(train, tmp_path / "parts", options, until, mesh)
    for name in "model.safetensors", "state.safetensors":
        one, other = (saves(tmp_path / run)[-1] / name for run in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes()
