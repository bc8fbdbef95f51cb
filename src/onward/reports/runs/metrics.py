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
    """The measurements of a run, the rows of its metrics.jsonl in the order in which they were written, and separately
    the rows of its rollbacks (returns to an earlier save after a failed step)."""

    rows: list[dict[str, float]]  # finite numbers of each step and each validation
    rollbacks: list[dict[str, Any]]  # each with failed_step, the reason, and the step of the save it returned to

    @cached_property
    def steps(self) -> list[dict[str, float]]:
        """The rows of training steps: {name of a figure, such as step or loss: value}."""
        return [row for row in self.rows if "loss" in row]

    @cached_property
    def validations(self) -> list[dict[str, float]]:
        """The rows of validations: {name of a figure, such as step or validation_loss: value}."""
        return [row for row in self.rows if "validation_loss" in row]

    def coordinates(self, steps: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the coordinates (3, N) of N training steps of this run on the three horizontal axes of plots: the
        steps themselves, and the seconds and the tokens of training up to the end of each."""
        known, *sums = self.sums
        return np.stack([np.asarray(steps, float), *(np.interp(steps, known, of_axis) for of_axis in sums)])

    @cached_property
    def sums(self) -> list[np.ndarray]:
        """The points between which `coordinates` interpolates: the start of the run and the end of every step, as three
        arrays: steps, seconds of training so far, and tokens so far."""
        seconds, tokens = ([0.0, *(row.get(axis, 0.0) for row in self.steps)] for axis in AXES[1:])
        return [np.array([0.0, *(row["step"] for row in self.steps)]), np.cumsum(seconds), np.cumsum(tokens)]


def read_metrics(run: Path) -> Metrics:
    """Read the metrics of the run in the folder `run`; without metrics.jsonl they are empty."""
    lines = read_lines(run / "metrics.jsonl")
    rollbacks = [{"step": "?", "failed_step": row.get("step")} | row for row in lines if "reason" in row]
    rows = [numbers(row) for row in lines if "reason" not in row]
    return Metrics(
        [row for row in rows if row.get("step", 0) > 0],
        [row for row in rollbacks if numbers(row).get("failed_step", 0) > 0],
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects in the lines of a .jsonl file. Incomplete lines, and lines that are not objects, are
    skipped."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    return [row for row in rows if isinstance(row, dict)]


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of a row of measurements whose values are finite numbers, without those too large to plot."""
    return {key: value for key, value in row.items() if isinstance(value, int | float) and abs(value) < LARGEST}


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Return the values of a curve smoothed for a plot: the centered moving mean over 2 % of the values; over fewer
    near the beginning, where losses fall fast."""
    count = len(values)
    cumulated = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    index = np.arange(count)
    reach = np.minimum(index // 4, count // 100)
    first, last = index - reach, np.minimum(index + reach, count - 1) + 1
    return (cumulated[last] - cumulated[first]) / (last - first)


def sample(count: int, most: int) -> list[int]:
    """Choose at most `most` of the indices 0 to `count` - 1, including the first and the last: half evenly spaced, half
    logarithmically. Used to draw long curves."""
    if count <= most:
        return list(range(count))
    even, early = np.linspace(0, count - 1, most // 2), np.geomspace(1, count, most // 2) - 1
    return sorted({round(float(i)) for i in (*even, *early)})
