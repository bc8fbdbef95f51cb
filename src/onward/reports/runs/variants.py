"""Compares variants of a run: a table, whether differences exceed noise, curves, and the loss over the swept field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from onward.base.errors import UserError
from onward.evaluation.significance import Difference, paired_difference
from onward.reports.pictures.panels import bars, curves
from onward.reports.pictures.picture import Picture
from onward.reports.pictures.plot import AXES
from onward.reports.runs.metrics import Metrics
from onward.reports.runs.record import RunRecord
from onward.training.studies.variants import Measure, Outcome

POINTS = 100  # points of a curve
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
LEVEL = 0.95
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five"}


@dataclass(frozen=True)
class Result:
    """The figures of one variant: the measure for each seed, and the mean difference from the first variant."""

    name: str
    values: list[float]  # value of the measure in each run; empty if a run diverged
    parameters: int | None
    steps: int
    tokens: int
    seconds: float  # seconds of training, mean of the runs
    difference: Difference | None = None  # difference of the measure from the first variant

    @property
    def mean(self) -> float:
        """The mean of the measure; infinite if a run diverged."""
        return fmean(self.values) if self.values else math.inf

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds."""
        return stdev(self.values) if len(self.values) > 1 else None

    def verdict(self, first: Result) -> str:
        if self is first:
            return "baseline of the others"
        if not self.values or not first.values:
            return "diverged" if not self.values else f"{first.name} diverged"
        if self.difference is None:
            return f"{self.mean - first.mean:+.4f}; one seed gives no estimate of noise"
        difference, word = self.difference, "better" if self.mean < first.mean else "worse"
        between = f"{difference.mean:+.4f} ({difference.low:+.4f} to {difference.high:+.4f})"
        seeds = len(self.values)
        return f"{between}: {word if difference.shown else f'{NUMBERS.get(seeds, seeds)} seeds are too few to tell'}"


def results(outcomes: Sequence[Outcome], measure: Measure) -> list[Result]:
    """Return the Result of each outcome. Differences from the first variant are paired by seed. Their intervals hold
    jointly at LEVEL: each of n has level 1 - (1 - LEVEL) / n (Bonferroni)."""
    base = outcomes[0].values(measure)
    level = 1 - (1 - LEVEL) / max(1, len(outcomes) - 1)
    result = []
    for outcome in outcomes:
        runs = [RunRecord(run).figures() for run in outcome.runs]
        values = outcome.values(measure)
        # a seed fixes the order of the windows, so that much of the noise cancels in a difference
        paired = paired_difference(values, base, level) if values and base and outcome is not outcomes[0] else None
        seconds = fmean(run.seconds or 0.0 for run in runs)
        result.append(
            Result(outcome.variant.name, values, runs[0].parameters, runs[0].step, runs[0].tokens, seconds, paired)
        )
    return result


def row(result: Result, first: Result, measure: Measure) -> dict[str, str]:
    return {
        "variant": result.name,
        measure.replace("_", " "): f"{result.mean:.4f}" if result.values else "diverged",
        "seeds differ by": "" if result.spread is None else f"{result.spread:.4f}",
        "parameters": f"{result.parameters or 0:,}",
        "tokens": f"{result.tokens:,}",
        "seconds": f"{result.seconds:.0f}",
        f"against {first.name}": result.verdict(first),
    }


def plain(result: Result) -> dict[str, Any]:
    difference = result.difference and {**vars(result.difference), "more_than_noise": result.difference.shown}
    mean = result.mean if result.values else None
    return {**vars(result), "mean": mean, "spread": result.spread, "difference": difference}


def exact(result: Result) -> dict[str, Any]:
    """The numbers of a result as a row of CSV, with the measure of each seed."""
    found = plain(result)
    of_seeds = {f"run {i}": value for i, value in enumerate(found.pop("values"), 1)}
    between = {f"difference {name}": value for name, value in (found.pop("difference") or {}).items()}
    return {"variant": found.pop("name"), **found, **between, **of_seeds}


def comparison_picture(outcomes: Sequence[Outcome], measure: Measure, length: str, axis: str) -> Picture:
    """Draw the measure over "tokens" or "seconds": the mean over seeds, and their range; `length` says how long runs
    are."""
    name = "validation_loss" if measure == "loss" else measure
    lines = {
        run.variant.name: [curve(RunRecord(folder).metrics, name, axis) for folder in run.runs] for run in outcomes
    }
    every = [x for runs in lines.values() for x, _ in runs if len(x)]
    if not every:
        raise UserError("Cannot draw curves, because no run has reached a validation: give more time or steps")
    x = np.linspace(max(x[0] for x in every), max(x[-1] for x in every), POINTS)
    series, ranges = {}, {}
    for variant, runs in lines.items():
        drawn = np.stack([np.interp(x, *run, right=np.nan) if len(run[0]) else np.full(POINTS, np.nan) for run in runs])
        series[variant], ranges[variant] = drawn.mean(0), (drawn.min(0), drawn.max(0))
    seeds = len(outcomes[0].runs)
    caption = f"Validation of {len(outcomes)} variants, each trained for {length}"
    caption += f" with {seeds} seeds: the mean, and the range over seeds." if seeds > 1 else "."
    panel = curves("", x.tolist(), series, x_name=axis, ranges=ranges if seeds > 1 else {}, size=(860, 360))
    return Picture(f"Validation, {UNITS[measure]}", caption, [panel])


def curve(metrics: Metrics, name: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """The coordinates on `axis` and the values of the figure `name` at the validations."""
    coordinates = metrics.coordinates([row["step"] for row in metrics.validations])[AXES.index(axis)]
    return coordinates, np.array([row.get(name, np.nan) for row in metrics.validations])


@dataclass(frozen=True)
class Valley:
    """The results of a sweep over the values of one field, or of two."""

    field: str
    lines: Mapping[str, Mapping[str, Result]]  # results by values of the second field ("": none) and the first

    @classmethod
    def of(cls, grid: Sequence[Mapping[str, str]], points: Sequence[Result]) -> Valley:
        """`grid` has the field values of each of the results `points`."""
        first, *second = grid[0]
        lines: dict[str, dict[str, Result]] = {}
        for point, result in zip(grid, points):
            line = f"{second[0]} {point[second[0]]}" if second else ""
            lines.setdefault(line, {})[point[first]] = result
        return cls(first, lines)

    @property
    def numbers(self) -> list[float] | None:
        try:
            return [float(value) for value in next(iter(self.lines.values()))]
        except ValueError:
            return None

    def best(self) -> tuple[str, str, Result]:
        """(value of the second field, value of the first, result) with the least mean."""
        return min(
            ((line, value, result) for line, values in self.lines.items() for value, result in values.items()),
            key=lambda point: point[2].mean,
        )

    def edge(self) -> str:
        """A warning if the best value of the first field is the least or the greatest number tried, else ""."""
        _, value, result = self.best()
        if self.numbers is None or not result.values:
            return ""
        place = sorted(self.numbers).index(float(value))
        if 0 < place < len(self.numbers) - 1 or len(self.numbers) == 1:
            return ""
        more = "smaller" if place == 0 else "larger"
        return f"the best {self.field}, {value}, is at the edge of the values tried: also try {more} ones"


def valley_picture(valley: Valley, measure: Measure, length: str) -> Picture:
    """Draw the measure over the first field, one curve per value of the second; bars if the values are not two or more
    numbers."""
    title = f"{UNITS[measure]} after {length}"
    numbers = valley.numbers
    caption = f"Each point is a run of {length}, evaluated on the validation text."
    if numbers is None or len(numbers) < 2:
        panels = [
            bars(line, {value: result.mean for value, result in values.items() if result.values})
            for line, values in valley.lines.items()
        ]
        return Picture(title, caption, panels)
    order = np.argsort(numbers)
    x, log = np.array(numbers)[order], min(numbers) > 0 and max(numbers) / min(numbers) >= 4
    series, ranges = {}, {}
    for line, values in valley.lines.items():
        heights = [[*values.values()][i] for i in order]
        name = line or UNITS[measure]
        series[name] = np.array([result.mean if result.values else np.nan for result in heights])
        ends = [(min(r.values), max(r.values)) if r.values else (np.nan, np.nan) for r in heights]
        ranges[name] = tuple(np.array(ends).T)
    many = any(len(result.values) > 1 for values in valley.lines.values() for result in values.values())
    if many:
        caption = caption.replace("a run", "the mean of runs") + " The band is their range over seeds."
    _, value, best = valley.best()
    marks = {f"best: {value}": float(np.log10(float(value)) if log else float(value))} if best.values else {}
    panel = curves(
        "",
        (np.log10(x) if log else x).tolist(),
        series,
        x_name=f"{valley.field}, as a power of ten" if log else valley.field,
        marks=marks,
        ranges=ranges if many else {},
        size=(860, 360),
    )
    return Picture(title, caption, [panel])
