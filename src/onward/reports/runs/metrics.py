"""Reads metrics.jsonl, in which a run records one row per step, per validation and per rollback."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from onward.reports.pictures.plot import AXES

LARGEST = 1e100


@dataclass(frozen=True)
class Metrics:
    """The rows of a run's metrics.jsonl, with those of its rollbacks apart."""

    rows: list[dict[str, float]]  # finite numbers of each step and each validation
    rollbacks: list[dict[str, Any]]  # each with failed_step, the reason, and the step to which the run returned

    @cached_property
    def steps(self) -> list[dict[str, float]]:
        return [row for row in self.rows if "loss" in row]

    @cached_property
    def validations(self) -> list[dict[str, float]]:
        return [row for row in self.rows if "validation_loss" in row]

    def coordinates(self, steps: Sequence[float] | np.ndarray) -> np.ndarray:
        """Coordinates (3, N) of steps on the axes of plots: steps, seconds and tokens of training until then."""
        known, *sums = self.sums
        return np.stack([np.asarray(steps, float), *(np.interp(steps, known, of_axis) for of_axis in sums)])

    @cached_property
    def sums(self) -> list[np.ndarray]:
        """Points between which `coordinates` interpolates."""
        seconds, tokens = ([0.0, *(row.get(axis, 0.0) for row in self.steps)] for axis in AXES[1:])
        return [np.array([0.0, *(row["step"] for row in self.steps)]), np.cumsum(seconds), np.cumsum(tokens)]


def read_metrics(run: Path) -> Metrics:
    lines = read_lines(run / "metrics.jsonl")
    rollbacks = [{"step": "?", "failed_step": row.get("step")} | row for row in lines if "reason" in row]
    rows = [numbers(row) for row in lines if "reason" not in row]
    return Metrics(
        [row for row in rows if row.get("step", 0) > 0],
        [row for row in rollbacks if numbers(row).get("failed_step", 0) > 0],
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a .jsonl file; incomplete lines, and lines that are not objects, are skipped."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    return [row for row in rows if isinstance(row, dict)]


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row that are not too large to plot."""
    return {key: value for key, value in row.items() if isinstance(value, int | float) and abs(value) < LARGEST}


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Moving mean over 2 % of the values; over fewer near the end, and near the beginning, where losses fall fast."""
    count = len(values)
    cumulated = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    index = np.arange(count)
    reach = np.minimum(index // 4, count // 100)
    first, last = index - reach, np.minimum(index + reach, count - 1) + 1
    return (cumulated[last] - cumulated[first]) / (last - first)


def sample(count: int, most: int) -> list[int]:
    """Choose at most `most` of `count` indices, with the first and last: half evenly, half logarithmically."""
    if count <= most:
        return list(range(count))
    even, early = np.linspace(0, count - 1, most // 2), np.geomspace(1, count, most // 2) - 1
    return sorted({round(float(i)) for i in (*even, *early)})
