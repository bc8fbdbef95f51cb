"""Plots as SVG that a script can redraw: over steps, seconds or tokens, with a linear or logarithmic horizontal axis.

The script, report.js, only moves points horizontally; heights, ticks and everything else are computed here.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

AXES = "step", "seconds", "tokens"  # the x axes; seconds and tokens are sums over the steps
# The six colors of curves, from --accent on, also differ for color-blind readers: by at least 13 in CIEDE2000,
# simulated as in Machado et al. 2009, except --accent and --third, which differ by 8 and in their dashes.
COLORS = """
:root { color-scheme: light dark; --paper: #fcfbf9; --panel: #f4f2ee; --line: #dedad3; --ink: #23211e; --soft: #6b665e;
  --accent: #1f6f78; --second: #c2571a; --third: #7a4fa3; --fourth: #23305e; --fifth: #7a1020; --sixth: #6f7464 }
@media (prefers-color-scheme: dark) { :root { --paper: #151618; --panel: #1e2023; --line: #35383d; --ink: #e6e3dd;
  --soft: #9b978f; --accent: #5fb8c2; --second: #f0925a; --third: #bb98e8; --fourth: #d9f2ff; --fifth: #f2e88a;
  --sixth: #7f8c86 } }
"""
STYLE = """
.plot { font: 12px system-ui, sans-serif; fill: var(--soft) }
.plot text { paint-order: stroke; stroke: var(--paper); stroke-width: 4px }
.plot .paper { fill: var(--paper) }
.plot path, .plot line { fill: none; stroke: var(--line); stroke-linejoin: round }
.plot path.rate { fill: var(--line); stroke: none; opacity: .45 }
.plot path.raw { stroke: var(--accent); opacity: .3 }
.plot path.smooth { stroke: var(--accent); stroke-width: 2 }
.plot path.validation { stroke: var(--second); stroke-width: 1.5 }
.plot path.dots { stroke: var(--second); stroke-width: 7; stroke-linecap: round }
.plot path.other { stroke: var(--third); stroke-width: 1.5; stroke-dasharray: 5 3 }
.plot path.dots.other { stroke-width: 6; stroke-dasharray: none }
.plot path.fourth { stroke: var(--fourth); stroke-width: 1.5; stroke-dasharray: 2 3 }
.plot path.fifth { stroke: var(--fifth); stroke-width: 1.5; stroke-dasharray: 10 3 }
.plot path.sixth { stroke: var(--sixth); stroke-width: 1.5; stroke-dasharray: 8 3 2 3 }
.plot line.uniform { stroke: var(--soft); stroke-dasharray: 2 4 }
.plot path.rollback { stroke: var(--second); stroke-dasharray: 6 3 }
.plot .smooth-name { fill: var(--accent) } .plot .validation-name { fill: var(--second) }
.plot .other-name { fill: var(--third) } .plot .fourth-name { fill: var(--fourth) }
.plot .fifth-name { fill: var(--fifth) } .plot .sixth-name { fill: var(--sixth) }
"""
SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # between ticks


@dataclass(frozen=True)
class Frame:
    """The plotted area in pixels, and `domain` (3, 2): first and last coordinate in steps, seconds and tokens, between
    which a page can switch."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    domain: np.ndarray

    def x(self, coordinates: np.ndarray) -> np.ndarray:
        """Pixels (N,) of `coordinates` (3, N); the static picture uses the steps, on a linear axis."""
        first, last = self.domain[0]
        return self.left + (coordinates[0] - first) / max(last - first, 1e-9) * (self.right - self.left)


@dataclass(frozen=True)
class Heights:
    """A vertical axis, which maps values (N,) to pixels; values below `low` or above `high` are drawn at the edge."""

    frame: Frame
    low: float
    high: float
    log: bool = False

    def __call__(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        scale: Callable[[Any], Any] = np.log if self.log else np.asarray
        low, high = float(scale(self.low)), float(scale(self.high))
        share = (scale(np.clip(values, self.low, self.high)) - low) / (high - low)
        return self.frame.bottom - share * (self.frame.bottom - self.frame.top)

    def grid(self, most: int) -> str:
        """Horizontal lines with labels at about `most` round values."""
        values = log_ticks(self.low, self.high, most) if self.log else ticks(self.low, self.high, most)
        f = self.frame
        return "".join(
            f'<line x1="{f.left:g}" x2="{f.right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{f.left - 6:g}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>'
            for value, y in zip(values, self(values))
        )


# our own SVG: a page needs each curve as a picture and as data to redraw, and matplotlib writes only the picture
@dataclass(frozen=True)
class Series:
    """One curve: `coordinates` (3, N) in steps, seconds and tokens, and `heights` (N,) in pixels."""

    style: str  # the CSS classes
    shape: Literal["line", "area", "dots", "marks"]  # marks: vertical lines over the full height
    coordinates: np.ndarray
    heights: np.ndarray
    name: str = ""  # name shown with the value at the pointer; "": no value is shown
    values: Sequence[float] | np.ndarray = ()
    opacity: float = 1.0

    def path(self, frame: Frame) -> str:
        # the page's script replaces x after each M, L and H, in the order of the points; H ends an area at its first x
        points = list(zip(frame.x(self.coordinates), self.heights))
        match self.shape:
            case "line" | "area":
                d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
                d += f"V{frame.bottom:g}H{points[0][0]:.1f}Z" if self.shape == "area" else ""
            case "dots":
                d = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
            case "marks":
                d = "".join(f"M{x:.1f} {frame.top:g}V{frame.bottom:g}" for x, _ in points)
        return f'<path class="{self.style}" opacity="{self.opacity:.2g}" d="{d}"/>'


def plot(
    frame: Frame, series: Iterable[Series], around: str, title: str, most_ticks: int
) -> tuple[str, dict[str, Any]]:
    """An SVG of curves, drawn over the SVG elements `around`, such as a grid; and the data from which a page redraws
    it."""
    drawn = [line for line in series if len(line.heights)]
    tables = {id(line.coordinates): line.coordinates for line in drawn}
    order = list(tables)
    ticks_of = {
        axis: axis_ticks(axis, float(first), float(last), most_ticks) for axis, (first, last) in zip(AXES, frame.domain)
    }
    labels = "".join(
        f'<text x="{float(frame.x(np.array([[place]]))[0]):.1f}" y="{frame.bottom + 16:g}" text-anchor="middle">'
        f"{label}</text>"
        for place, label in ticks_of["step"][0]
    )
    svg = (
        f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" style="--width:{frame.width:g}px" class="plot" '
        f'role="img" aria-label="{title}">{around}'
        f'<g class="ticks">{labels}</g>{"".join(line.path(frame) for line in drawn)}</svg>'
    )
    return svg, {
        "x": [frame.left, frame.right],
        "y": [frame.top, frame.bottom],
        "domain": rounded(frame.domain),
        "places": [rounded(tables[key]) for key in order],
        "series": [
            {"places": order.index(id(line.coordinates)), "name": line.name, "values": rounded(np.asarray(line.values))}
            for line in drawn
        ],
        "ticks": ticks_of,
    }


def rounded(values: np.ndarray) -> Any:
    """Nested lists of five significant digits; integers are exact."""
    if values.ndim > 1:
        return [rounded(row) for row in values]
    return [int(v) if v == int(v) else float(f"{v:.5g}") for v in values.tolist()]


def axis_ticks(axis: str, first: float, last: float, most: int) -> list[list[tuple[float, str]]]:
    """Ticks (coordinate, label) for the linear and the logarithmic scale of "step", "seconds" or "tokens"."""
    if first < 0 or (axis == "step" and (last < 2 or first != int(first))):  # the coordinates are not counts
        linear = [t for t in ticks(first, last, most) if first <= t <= last]
        return [[(t, f"{t:g}") for t in values] for values in (linear, log_ticks(max(first, 1), max(last, 1), most))]
    if axis == "seconds":
        gap: float = next((s for s in SECONDS if last / s <= most), 86400 * math.ceil(last / 86400 / most))
        gap = gap if last > 3 else 10.0 ** math.floor(math.log10(max(last, 1e-3)))
        linear = [gap * i for i in range(1, int(last / gap) + 1)]
        log = [s for s in (0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 36000, 360000) if first <= s <= last]
        return [[(s, clock(s)) for s in values] for values in (linear, log)]
    linear = [t for t in ticks(0, last, most) if t >= max(first, 1) and t == int(t)]
    label: Callable[[float], str] = short if axis == "tokens" else lambda step: f"{step:,.0f}"
    return [[(t, label(t)) for t in values] for values in (linear, log_ticks(max(first, 1), max(last, 1), most))]


def ticks(low: float, high: float, most: int) -> list[float]:
    """About `most` round numbers at equal distances."""
    raw = (high - low) / most or 1.0
    unit = 10.0 ** math.floor(math.log10(raw))
    step = unit * next(m for m in (1, 2, 5, 10) if m * unit >= raw * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` powers of ten and, where they fit, their multiples by 2 and 5, or by 3."""
    exponents = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    for factors in (1, 2, 5), (1, 3), (1,):
        round_numbers = [m * 10.0**e for e in exponents for m in factors if low * 0.999 <= m * 10.0**e <= high * 1.001]
        if len(round_numbers) <= most:
            return round_numbers
    return round_numbers[:: math.ceil(len(round_numbers) / most)]


def short(number: float) -> str:
    """A number in a few characters: 1.5 M, 20 k, 0.003."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= unit:
            return f"{number / (1e3 if name == 'k' else unit):.3g} {name}"
    return f"{number:,.0f}" if number == int(number) else f"{number:.3g}"


def clock(seconds: float) -> str:
    """Seconds for an axis: 0.1 s, 30 s, 5 min, 1.5 h, 2 d."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
