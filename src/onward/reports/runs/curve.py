"""Draws the loss curve of a run: as loss.svg, and for its page, with that of a second run if one is given."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onward.base.files import atomic_write
from onward.reports.pictures.markup import embedded, visible
from onward.reports.pictures.plot import COLORS, STYLE, Frame, Heights, Series, plot
from onward.reports.runs.metrics import Metrics, read_metrics, sample, smoothed

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860.0, 356.0, 46.0, 840.0, 34.0, 310.0
POINTS = 600  # largest number of points of a curve


def loss_figure(metrics: Metrics, guesses: int, other: Metrics | None = None, other_name: str = "") -> str:
    """Loss curve as HTML that the page's script redraws; the run must have made at least one step. `guesses`:
    vocabulary size, for the line of a uniform guess, or 0."""
    svg, data = loss_plot(metrics, guesses, other, other_name)
    script = f'<script type="application/json">{embedded(data)}</script>'
    return f'<figure class="curve">{svg}<p class="readout js"></p>{script}</figure>'


def write_loss_svg(run: Path, guesses: int) -> Path | None:
    """Write loss.svg and return its path; None if the run has made no step yet."""
    metrics = read_metrics(run)
    if not metrics.steps:
        return None
    with atomic_write(run / "loss.svg") as new:
        new.write_text(loss_svg(metrics, guesses), encoding="utf-8")
    return run / "loss.svg"


def loss_svg(metrics: Metrics, guesses: int) -> str:
    """The loss curve as a standalone SVG."""
    svg, _ = loss_plot(metrics, guesses)
    head, rest = svg.split(">", 1)
    size = f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH:g}" height="{HEIGHT:g}"'
    paper = f'<rect class="paper" width="{WIDTH:g}" height="{HEIGHT:g}" rx="8"/>'
    return f"{head} {size}><style>{COLORS}{STYLE}</style>{paper}{rest}\n"


def loss_plot(
    metrics: Metrics, guesses: int, other: Metrics | None = None, other_name: str = ""
) -> tuple[str, dict[str, Any]]:
    """The SVG, and data from which the page's script redraws it."""
    runs = [Curves.of(rows) for rows in (metrics, other) if rows and rows.steps]
    uniform, failed = math.log(max(guesses, 1)), [row["failed_step"] for row in metrics.rollbacks]
    low, high = min(run.low for run in runs), max(run.high for run in runs)
    show_uniform = bool(guesses) and high > 0.8 * uniform
    high = max(high, uniform) if show_uniform else high
    margin = 0.05 * (high - low) + 1e-6
    ends = np.concatenate([metrics.coordinates(failed), *(run.ends for run in runs)], axis=1)
    frame = Frame(WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, np.stack([ends.min(axis=1), ends.max(axis=1)], axis=1))
    y = Heights(frame, low - margin, high + margin)

    own = runs[0]
    peak = own.rates.max() or 1.0
    series = [
        Series(
            "rate", "area", own.coordinates, BOTTOM - own.rates / peak * (BOTTOM - TOP) / 3, "learning rate", own.rates
        ),
        Series("raw", "line", own.coordinates, y(own.losses), "this step", own.losses),
        Series("smooth", "line", own.coordinates, y(own.smooth), "training", own.smooth),
        Series("validation", "line", own.validated, y(own.validations), "validation", own.validations),
        Series("dots", "dots", own.validated, y(own.validations)),
        Series("rollback", "marks", metrics.coordinates(failed), np.zeros(len(failed))),
    ]
    for run in runs[1:]:
        series += [
            Series("other", "line", run.coordinates, y(run.smooth), f"{other_name}: training", run.smooth),
            Series(
                "dots other", "dots", run.validated, y(run.validations), f"{other_name}: validation", run.validations
            ),
        ]
    name = f'<text class="axis" x="{RIGHT:g}" y="{BOTTOM + 34:g}" text-anchor="end">step</text>'
    unit = "nats per token" if guesses else ""
    around = name + y.grid(6) + legend(own, unit, bool(failed), other_name if len(runs) > 1 else "")
    if show_uniform:
        at = float(y([uniform])[0])
        around += (
            f'<line class="uniform" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{RIGHT}" y="{at + 15:.1f}" text-anchor="end">'
            f"a uniform guess among {guesses:,} tokens: ln {guesses} = {uniform:.2f}</text>"
        )
    return plot(frame, series, around, "Loss by training step", 8)


@dataclass(frozen=True)
class Curves:
    """The curves of a run, with at most POINTS points each."""

    coordinates: np.ndarray  # coordinates of the steps on AXES, (3, N)
    losses: np.ndarray
    smooth: np.ndarray
    rates: np.ndarray
    validated: np.ndarray  # coordinates of the validations on AXES, (3, M)
    validations: np.ndarray
    low: float  # smallest loss
    high: float  # maximum of the first step's loss, the validation losses and the smoothed curve
    ends: np.ndarray  # coordinates of the first and the last row, (3, 2)

    @classmethod
    def of(cls, metrics: Metrics) -> "Curves":
        steps, validations = metrics.steps, metrics.validations
        losses, validated = [row["loss"] for row in steps], [row["validation_loss"] for row in validations]
        smooth, kept, chosen = smoothed(losses), sample(len(steps), POINTS), sample(len(validations), POINTS)
        return cls(
            metrics.coordinates([steps[i]["step"] for i in kept]),
            np.array(losses)[kept],
            smooth[kept],
            np.array([steps[i].get("learning_rate", 0.0) for i in kept]),
            metrics.coordinates([validations[i]["step"] for i in chosen]),
            np.array([validated[i] for i in chosen]),
            min(losses + validated),
            max(*smooth, losses[0], *validated),
            metrics.coordinates([steps[0]["step"], max(row["step"] for row in metrics.rows)]),
        )


def legend(run: Curves, unit: str, rollbacks: bool, other_name: str) -> str:
    raw = "" if np.allclose(run.smooth, run.losses) else " (faint: single steps)"
    names = [("smooth-name", f"&#9644; training{raw}")]
    names += [("validation-name", "&#9679; validation")] * bool(len(run.validations))
    names += [("", f"&#9650; learning rate, up to {run.rates.max():.3g}")]
    names += [("validation-name", "&#9475; rollback")] * rollbacks
    names += [("other-name", f"&#9644; {visible(other_name)}")] * bool(other_name)
    spans = "".join(f'<tspan class="{style}" dx="16">{name}</tspan>' for style, name in names)
    return f'<text x="4" y="14">{", ".join(filter(None, ("loss", unit)))}{spans}</text>'
