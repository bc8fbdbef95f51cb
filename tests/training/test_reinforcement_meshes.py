"""Reinforcement in several processes: equal to one process, and resumed exactly."""

from pathlib import Path
from typing import Any

import pytest

from onward.checkpoint.saves.folder import saves
from onward.training.run.run import Run

from support.finetuning import base_model, config, write_rows
from support.ranks import Ranks

OPTIONS: dict[str, Any] = {"method": "grpo", "reward": "length(characters=3)", "samples": 2, "completion_length": 4}
OPTIONS |= {"batch_size": 2, "accumulation": 2, "steps": 4, "validate_every": 4}


def train(out: Path, base: Path, rows: Path, until: int, mesh: str, **options: Any) -> None:
    """Begin or resume a run, up to a step."""
    run = Run.resume(out) if out.exists() else Run.start(config(base, rows, out, **OPTIONS | options, mesh=mesh))
    list(run.train(lambda: run.step >= until))


def prompts(folder: Path) -> Path:
    return write_rows(folder / "sums.jsonl", [{"prompt": f"{i} + {i % 7}?", "answer": str(i)} for i in range(24)])


def train_replicas(out: Path, base: Path, rows: Path, until: int) -> None:
    train(out, base, rows, until, "replicate=2", iterations=3, replay=4)


def test_replicas_resume_with_their_own_completions(two: Ranks, tmp_path: Path) -> None:
    """Stopped between steps on the same completions, with prompts to replay."""
    base, rows = base_model(tmp_path / "base"), prompts(tmp_path)
    two.run(train_replicas, tmp_path / "whole", base, rows, 4)
    for until in 2, 4:
        two.run(train_replicas, tmp_path / "parts", base, rows, until)
    for name in "model.safetensors", "state.safetensors":
        one, other = (saves(tmp_path / run)[-1] / name for run in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes()
