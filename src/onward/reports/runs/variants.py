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
from onward.reports.runs.record import Record
from onward.training.studies.variants import Measure, Outcome

POINTS = 100  # of a curve
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
LEVEL = 0.95
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five"}


@dataclass(frozen=True)
class Result:
    """The figures of one variant, a configuration among those that `onward compare` or `onward sweep` trains: a value
    of the measure, such as the validation loss, for each seed, and their mean difference from the first variant."""

    name: str
    values: list[float]  # value of the measure in each run; empty if a run diverged
    parameters: int | None
    steps: int
    tokens: int
    seconds: float  # seconds of training, mean of the runs
    difference: Difference | None = None  # difference of the measure from the first variant

    @property
    def mean(self) -> float:
        """The mean of the measure over the seeds; infinite if a run diverged."""
        return fmean(self.values) if self.values else math.inf

    @property
    def spread(self) -> float | None:
        """The standard deviation of the measure over the seeds; None for a single seed."""
        return stdev(self.values) if len(self.values) > 1 else None

    def verdict(self, first: Result) -> str:
        """Return words that say how this variant compares with the variant `first`, such as better, worse or within
        noise."""
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
    """Compute the figures of each variant for `measure` ("loss" or "bits_per_byte") from its `Outcome`, the result of
    its runs with different seeds.

    Differences from the first variant are paired by seed. Their confidence intervals hold jointly with LEVEL: with n
    differences, each interval has level 1 - (1 - LEVEL) / n (Bonferroni).
    """
    base = outcomes[0].values(measure)
    level = 1 - (1 - LEVEL) / max(1, len(outcomes) - 1)
    result = []
    for outcome in outcomes:
        runs = [Record(run).figures() for run in outcome.runs]
        values = outcome.values(measure)
        paired = paired_difference(values, base, level) if values and base and outcome is not outcomes[0] else None
        seconds = fmean(run.seconds or 0.0 for run in runs)
        result.append(
            Result(outcome.variant.name, values, runs[0].parameters, runs[0].step, runs[0].tokens, seconds, paired)
        )
    return result


def row(result: Result, first: Result, measure: Measure) -> dict[str, str]:
    """Return a variant's result as a row of the table that `onward compare` prints, as {column: text}; `first` is the
    variant that it is compared with, and `measure` ("loss" or "bits_per_byte") names the column of the mean."""
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
    """Return the figures of a variant as a dict of JSON values."""
    difference = result.difference and {**vars(result.difference), "more_than_noise": result.difference.shown}
    mean = result.mean if result.values else None
    return {**vars(result), "mean": mean, "spread": result.spread, "difference": difference}


def comparison_picture(outcomes: Sequence[Outcome], measure: Measure, length: str, axis: str) -> Picture:
    """Draw the validation loss or bits per byte (`measure`) of each variant over "tokens" or "seconds" (`axis`): the
    mean over its runs with different seeds, and their range. `length` says in words how long the runs are, for the
    caption. Raises a UserError if no run has reached a validation."""
    name = "validation_loss" if measure == "loss" else measure
    lines = {run.variant.name: [curve(Record(folder).metrics, name, axis) for folder in run.runs] for run in outcomes}
    every = [x for runs in lines.values() for x, _ in runs if len(x)]
    if not every:
        raise UserError("no run has reached a validation: give more time or steps")
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
    """Return two arrays with a point for each validation of a run: the coordinate on `axis`, "tokens" or "seconds", and
    the value of the figure `name`, such as "validation_loss"."""
    coordinates = metrics.coordinates([row["step"] for row in metrics.validations])[AXES.index(axis)]
    return coordinates, np.array([row.get(name, np.nan) for row in metrics.validations])


@dataclass(frozen=True)
class Valley:
    """The results of a sweep, which trains a run for each value of one field of the configuration or each pair of
    values of two fields; the setting with the least mean is the best one."""

    field: str
    lines: Mapping[str, Mapping[str, Result]]  # by the second field's value ("": no such field), by the first's

    @classmethod
    def of(cls, grid: Sequence[Mapping[str, str]], points: Sequence[Result]) -> Valley:
        """Arrange the results `points` of a sweep by the field values with which they were trained: `grid` has one dict
        {field: value} per result, all with the same one or two fields."""
        first, *second = grid[0]
        lines: dict[str, dict[str, Result]] = {}
        for point, result in zip(grid, points):
            line = f"{second[0]} {point[second[0]]}" if second else ""
            lines.setdefault(line, {})[point[first]] = result
        return cls(first, lines)

    @property
    def numbers(self) -> list[float] | None:
        """The tried values of the first swept field as numbers; None if a value is not a number."""
        try:
            return [float(value) for value in next(iter(self.lines.values()))]
        except ValueError:
            return None

    def best(self) -> tuple[str, str, Result]:
        """Return the best setting as (value of the second field, value of the first field, result): the result with the
        least mean. The second value is "" in a sweep of one field."""
        return min(
            ((line, value, result) for line, values in self.lines.items() for value, result in values.items()),
            key=lambda point: point[2].mean,
        )

    def edge(self) -> str:
        """Return a warning if the best value of the first swept field is the least or the greatest number tried; else
        ""."""
        _, value, result = self.best()
        if self.numbers is None or not result.values:
            return ""
        place = sorted(self.numbers).index(float(value))
        if 0 < place < len(self.numbers) - 1 or len(self.numbers) == 1:
            return ""
        more = "smaller" if place == 0 else "larger"
        return f"the best {self.field}, {value}, is at the edge of the values tried: try {more} ones too"


def valley_picture(valley: Valley, measure: Measure, length: str) -> Picture:
    """Draw the measure ("loss" or "bits_per_byte") over the values of the first swept field, one curve for each value
    of the second: a curve with the range over seeds, or bars if the values are not numbers. `length` says in words how
    long the runs are."""
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
