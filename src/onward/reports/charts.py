"""Small charts of what a run recorded beside its loss: how steep, how even, how alive."""

from collections import defaultdict

import numpy as np

from onward.reports.curve import Metrics, across, path

KINDS = {  # name in metrics.jsonl (of one for each layer, before the "/"): title, and how to read it
    "learning_rate": ("learning rate", "how far a step goes"),
    "grad_norm": ("gradient norm", "before clipping; jumps announce trouble"),
    "update_ratio": ("update ratio", "what a step changes, as a share of the weights; about 0.001 is usual"),
    "attention_entropy": ("attention entropy", "nats; near 0 a layer reads single tokens, high it reads all alike"),
    "dead_units": ("dead units", "share of the feed-forward that never answers"),
    "expert_load": ("expert load", "visits to the busiest expert over the mean; 1 is even"),
}
WIDTH, HEIGHT, TOP, BOTTOM = 270.0, 100.0, 8.0, 78.0
POINTS = 160  # the most of a line; each is the highest of those it stands for, so that no jump is lost


def charts(metrics: Metrics) -> str:
    """A figure for each kind of number that the run recorded at two steps at least."""
    lines: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in metrics.rows:
        for key, value in row.items():
            kind, _, layer = key.partition("/")
            lines[kind][layer].append((row["step"], value))
    troubles = [row["failed_step"] for row in metrics.troubles]
    last = max([*(row["step"] for row in metrics.rows), *troubles], default=1)
    return "".join(
        figure(kind, list(lines[kind].values()), troubles, last)
        for kind in KINDS
        if any(len(line) > 1 for line in lines[kind].values())
    )


def figure(kind: str, lines: list[list[tuple[float, float]]], troubles: list[float], last: float) -> str:
    """One line for each layer over the steps, from 0; what is far above the rest is cut off."""
    title, reading = KINDS[kind]
    values = [value for line in lines for _, value in line]
    high = min(max(values), 3 * float(np.quantile(values, 0.95))) or max(values) or 1.0
    x = lambda step: WIDTH * (step - 1) / max(last - 1, 1)
    y = lambda value: max(TOP, BOTTOM - value / high * (BOTTOM - TOP))
    drawn = ""
    for i, line in enumerate(lines):
        stretches = np.array_split(line, min(len(line), POINTS))
        points = [(x(stretch[0, 0]), y(stretch[:, 1].max())) for stretch in stretches]
        drawn += f'<g opacity="{(i + 1) / len(lines):.2f}">{path("smooth", points)}</g>'
    marks = "".join(f'<line class="trouble" {across(x(step))} y1="{TOP}" y2="{BOTTOM}"/>' for step in troubles)
    now = sum(line[-1][1] for line in lines) / len(lines)
    return (
        f"<figure><h3>{title} <b>{now:.3g}</b></h3>"
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" class="plot" role="img" aria-label="{title} by training step">'
        f'<line x1="0" x2="{WIDTH:g}" y1="{BOTTOM}" y2="{BOTTOM}"/>{marks}{drawn}'
        f'<text x="0" y="{BOTTOM + 16}">0 to {high:.3g}</text>'
        f'<text x="{WIDTH:g}" y="{BOTTOM + 16}" text-anchor="end">step {last:,.0f}</text></svg>'
        f'<p class="quiet">{reading}</p></figure>'
    )
