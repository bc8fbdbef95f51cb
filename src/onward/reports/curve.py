"""The loss curve of a run as SVG: in the report, and as a file of its own."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onward.files import written_whole

COLORS = """
:root { color-scheme: light dark; --paper: #fcfbf9; --panel: #f4f2ee; --line: #dedad3; --ink: #23211e; --soft: #6b665e;
  --accent: #1f6f78; --second: #c2571a }
@media (prefers-color-scheme: dark) { :root { --paper: #151618; --panel: #1e2023; --line: #35383d; --ink: #e6e3dd;
  --soft: #9b978f; --accent: #5fb8c2; --second: #f0925a } }
"""
STYLE = """
.plot { font: 12px system-ui, sans-serif; fill: var(--soft) }
.plot text { paint-order: stroke; stroke: var(--paper); stroke-width: 4px }
.plot path, .plot line { fill: none; stroke: var(--line) }
.plot path.rate { fill: var(--line); stroke: none; opacity: .45 }
.plot path.raw { stroke: var(--accent); opacity: .3 }
.plot path.smooth { stroke: var(--accent); stroke-width: 2 }
.plot path.validation { stroke: var(--second); stroke-width: 1.5 }
.plot circle { fill: var(--second); stroke: none }
.plot line.even { stroke: var(--soft); stroke-dasharray: 2 4 }
.plot line.trouble { stroke: var(--second); stroke-dasharray: 6 3 }
.plot .smooth-name { fill: var(--accent) } .plot .validation-name { fill: var(--second) }
"""
LEFT, RIGHT, TOP, BOTTOM = 42.0, 836.0, 34.0, 310.0  # of the plotted area, in a picture of 860 by 350
POINTS = 600  # the most that are drawn of a curve


@dataclass(frozen=True)
class Metrics:
    """What a run has recorded, in the order of the steps."""

    rows: list[dict[str, float]]  # the numbers
    troubles: list[
        dict[str, Any]
    ]  # failed steps ("failed_step"), their "reason", and the save they went back to ("step")

    @property
    def steps(self) -> list[dict[str, float]]:
        """The rows of steps."""
        return [row for row in self.rows if "loss" in row]

    @property
    def validations(self) -> list[dict[str, float]]:
        """The rows of validations."""
        return [row for row in self.rows if "validation_loss" in row]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The tables in a .jsonl file; what is missing, cut off or no table is left out."""
    found = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    return [row for row in found if isinstance(row, dict)]


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers in a table."""
    return {key: value for key, value in row.items() if isinstance(value, int | float) and math.isfinite(value)}


def read_metrics(run: Path) -> Metrics:
    """What is in metrics.jsonl of a run folder."""
    lines = read_lines(run / "metrics.jsonl")
    troubles = [{"step": "?", "failed_step": row.get("step")} | row for row in lines if "reason" in row]
    rows = [numbers(row) for row in lines if "reason" not in row]
    return Metrics(
        [row for row in rows if row.get("step", 0) > 0],
        [row for row in troubles if numbers(row).get("failed_step", 0) > 0],
    )


def smoothed(values: Sequence[float]) -> np.ndarray:
    """The mean of 2 % of the values, around each, and of fewer where the curve begins, so that it keeps its shape."""
    count = len(values)
    cumulated = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    place = np.arange(count)
    reach = np.minimum(place // 4, count // 100)
    first, last = place - reach, np.minimum(place + reach, count - 1) + 1
    return (cumulated[last] - cumulated[first]) / (last - first)


def sample(count: int, most: int = POINTS) -> list[int]:
    """At most so many of `count` places, from the first to the last: half spread evenly, half logarithmically."""
    if count <= most:
        return list(range(count))
    even, early = np.linspace(0, count - 1, most // 2), np.geomspace(1, count, most // 2) - 1
    return sorted({round(float(i)) for i in (*even, *early)})


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high."""
    raw = (high - low) / count or 1.0
    unit = 10.0 ** math.floor(math.log10(raw))
    step = unit * next(m for m in (1, 2, 5, 10) if m * unit >= raw * 0.999)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def log_ticks(high: float) -> list[float]:
    """1, 10, 100, ..., and 2 and 5 times those if they are few, up to high."""
    few = (1, 2, 5) if high < 2_000 else (1,)
    return [m * 10.0**e for e in range(math.floor(math.log10(max(high, 1))) + 1) for m in few if m * 10.0**e <= high]


def path(kind: str, points: Sequence[tuple[float, float]]) -> str:
    """A line through points, with a class."""
    return f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>' if points else ""


def across(x: float) -> str:
    """The ends of an upright line."""
    return f'x1="{x:.1f}" x2="{x:.1f}"'


def loss_svg(metrics: Metrics, vocab_size: int, *, log: bool = False) -> tuple[str, list[list[Any]]]:
    """The loss curve, and what can be read off it: [x, y, step, loss, smoothed, learning rate, last validation loss].

    `log` makes the axis of the steps logarithmic. Needs at least one step.
    """
    steps, validations = metrics.steps, metrics.validations
    last = max(*(row["step"] for row in metrics.rows), *(row["failed_step"] for row in metrics.troubles), 1)
    losses, even = [row["loss"] for row in steps], math.log(vocab_size)
    smooth = smoothed(losses)
    seen = [*losses, *(row["validation_loss"] for row in validations)]
    low, high = min(seen), max(*smooth, losses[0], *(row["validation_loss"] for row in validations))
    show_even = high > 0.8 * even
    high = max(high, even) if show_even else high
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low) + 1e-6

    share: Callable[[float], float] = lambda step: (
        math.log(step) / math.log(max(last, 2)) if log else (step - 1) / max(last - 1, 1)
    )
    x = lambda step: LEFT + share(step) * (RIGHT - LEFT)
    y = lambda loss: max(TOP, BOTTOM - (loss - low) / (high - low) * (BOTTOM - TOP))

    places = sample(len(steps))
    xs = [x(steps[i]["step"]) for i in places]
    rates = [steps[i].get("learning_rate", 0.0) for i in places]
    peak = max(rates) or 1.0
    rate = [(px, BOTTOM - r / peak * (BOTTOM - TOP) / 3) for px, r in zip(xs, rates)]
    marks = [(x(row["step"]), y(row["validation_loss"])) for row in (validations[i] for i in sample(len(validations)))]
    parts = [
        *(
            f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{t:g}</text>'
            for t in ticks(low, high, 6)
        ),
        *(
            f'<text x="{x(t):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{t:,.0f}</text>'
            for t in (log_ticks(last) if log else [t for t in ticks(0, last, 8) if t >= 1 and t == int(t)])
        ),
        f'<text x="{RIGHT}" y="{BOTTOM + 34}" text-anchor="end">step</text>',
        f'<text x="{LEFT}" y="14">loss, nats per token'
        '<tspan class="smooth-name" dx="20">&#9644; training (pale: single steps)</tspan>'
        + ('<tspan class="validation-name" dx="14">&#9679; validation</tspan>' if marks else "")
        + '<tspan dx="14" opacity=".7">&#9650; learning rate</tspan>'
        + ('<tspan class="validation-name" dx="14">&#9475; trouble</tspan>' if metrics.troubles else "")
        + "</text>",
        path("rate", [(rate[0][0], BOTTOM), *rate, (rate[-1][0], BOTTOM)]),
        path("raw", [(px, y(losses[i])) for px, i in zip(xs, places)]),
        path("smooth", [(px, y(smooth[i])) for px, i in zip(xs, places)]),
        path("validation", marks),
        *(
            f'<line class="trouble" {across(x(row["failed_step"]))} y1="{TOP}" y2="{BOTTOM}"/>'
            for row in metrics.troubles
        ),
        *(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>' for px, py in marks),
    ]
    if show_even:
        parts.append(
            f'<line class="even" x1="{LEFT}" x2="{RIGHT}" y1="{y(even):.1f}" y2="{y(even):.1f}"/>'
            f'<text x="{RIGHT}" y="{y(even) + 15:.1f}" text-anchor="end">'
            f"guessing among {vocab_size:,} tokens: ln {vocab_size} = {even:.2f}</text>"
        )
    rows = []
    for px, r, i in zip(xs, rates, places):
        before = [row["validation_loss"] for row in validations if row["step"] <= steps[i]["step"]]
        values = [steps[i]["step"], round(losses[i], 4), round(float(smooth[i]), 4), float(f"{r:.3g}")]
        rows.append([round(px, 1), round(y(smooth[i]), 1), *values, round(before[-1], 4) if before else None])
    svg = (
        f'<svg viewBox="0 0 860 350" class="plot" role="img" aria-label="Loss by training step">{"".join(parts)}</svg>'
    )
    return svg, rows


def write_loss_svg(run: Path, vocab_size: int) -> Path | None:
    """Write the loss curve of a run folder as loss.svg; None if the run has made no step yet."""
    metrics = read_metrics(run)
    if not metrics.steps:
        return None
    svg, _ = loss_svg(metrics, vocab_size)
    head, rest = svg.split(">", 1)
    with written_whole(run / "loss.svg") as new:
        new.write_text(
            f'{head} xmlns="http://www.w3.org/2000/svg"><style>{COLORS}{STYLE}</style>{rest}\n', encoding="utf-8"
        )
    return run / "loss.svg"
