"""Small runs for tests of training, and comparisons of runs."""

import json
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported here: its first import keeps its callers' frames, and thus a run's lock, alive

from onward import RunConfig
from onward.checkpoint.saves.folder import saves
from onward.checkpoint.weights import read_tensors

from support.devices import device

TINY = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "context_length": 32, "dropout": 0.1}
SETTINGS: dict[str, Any] = {"tokenizer": "char", "steps": 30, "batch_size": 4, "precision": "fp32"}
SETTINGS |= {"device": str(device())}
SETTINGS |= {"validate_every": 10, "model": TINY, "learning_rate": 1e-2}


def config(story_file: Path, out: Path, **changes: Any) -> RunConfig:
    return RunConfig(sources=(str(story_file),), out=str(out), **SETTINGS | changes)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "rollout_share")} for line in lines]


def assert_same_adapters(one: Path, other: Path) -> None:
    """Assert that two runs have the same adapters, bit for bit, and the same metrics except for times."""
    for name in "adapter_model.safetensors", f"checkpoints/{saves(one)[-1].name}/state.safetensors":
        first, second = read_tensors(one / name), read_tensors(other / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name
    assert metrics(one) == metrics(other)


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that two runs are the same, bit for bit, except for times."""
    names = ["model.safetensors"]
    assert saves(one)[-1].name == saves(other)[-1].name
    names += [f"checkpoints/{saves(one)[-1].name}/{name}.safetensors" for name in ("model", "state")]
    for name in names:
        first, second = read_tensors(one / name), read_tensors(other / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name
    assert metrics(one) == metrics(other)
