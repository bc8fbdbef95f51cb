"""Color scales: map values to opacities, with a legend."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len

from onward.reports.pictures.markup import visible

SHADES, NEGATIVE = "·░▒▓█", "·−=≡≣"  # shading characters in a terminal, from 0 up
FAINT = 0.6  # largest strength of the color of a `faint` scale
STEPS, STEP, BAR = 17, 12, 11  # color bar of a legend: number of cells, width and height of a cell in pixels
LINE = 17  # height of a line of a legend in pixels
CHARACTER = 6.9  # largest width of a character of a legend in pixels


class Legend(NamedTuple):
    """SVG elements that start at the origin, and their size in pixels."""

    svg: str
    width: float
    height: float


@dataclass(frozen=True)
class ColorScale:
    """A color scale, which maps values to shades for the cells of a picture: 0 is transparent, and `top` is opaque
    unless `faint`. If `signed`, negative values use the second color, down to -top."""

    top: float
    signed: bool = False
    root: bool = False  # strength is the square root of the share, which makes small shares visible
    unit: str = ""  # unit of the values; "": no legend
    faint: bool = False  # limit the strength to FAINT, because texts are written over the cells
    keys: tuple[tuple[float, str], ...] = ()  # instead of a unit: all occurring values with their meanings
    clipped: bool = False  # whether values beyond `top` occur; they get the color of `top`

    @property
    def full(self) -> float:
        """The opacity of cells with the value `top`."""
        return FAINT if self.faint else 1.0

    def over(self, values: np.ndarray) -> "ColorScale":
        """A copy that is marked as `clipped` if some of `values` exceed the top."""
        beyond = bool(np.nanmax(np.abs(values), initial=0) > 1.001 * self.top)
        return replace(self, clipped=self.clipped or beyond)

    def strength(self, values: np.ndarray) -> np.ndarray:
        """Opacity, from 0 to 1; NaN counts as 0."""
        share = np.clip(np.nan_to_num(np.abs(values)) / (self.top or 1.0), 0, 1)
        return (np.sqrt(share) if self.root else share) * self.full

    def levels(self, values: np.ndarray) -> np.ndarray:
        """Index, from 0 to 4, of the shading character in a terminal; NaN counts as 0."""
        return np.ceil(4 * self.strength(values) / self.full - 1e-9).astype(int)

    def ticks(self) -> list[float]:
        if self.signed:
            return [self.top * tick for tick in (-1, -0.5, 0, 0.5, 1)]
        return [self.top * (share**2 if self.root else share) for share in (0, 0.25, 0.5, 0.75, 1)]

    @property
    def words(self) -> str:
        """The scale in words: its unit, its kind if it is not linear, and, if it is clipped, the value from which the
        color is full."""
        ends = f"full color from {'±' * self.signed}{brief(self.top)} on" if self.clipped else ""
        return ", ".join(filter(None, (self.unit, "square-root scale" * self.root, ends)))

    def legend(self) -> Legend:
        """A color bar with values at its quarters or, for a scale with `keys`, a cell for each key."""
        if self.keys:
            return self.legend_of_keys()
        shares = np.linspace(-1 if self.signed else 0, 1, STEPS) * self.full
        width = STEP * STEPS
        cells = "".join(
            f'<rect class="{"less" if share < 0 else "more"}" x="{STEP * i}" y="{LINE}" width="{STEP}" '
            f'height="{BAR}" opacity="{abs(share):.2f}"/>'
            for i, share in enumerate(shares)
        )
        names = "".join(
            f'<text class="number soft" x="{STEP * (i * (STEPS - 1) / 4 + 0.5):g}" y="{LINE + BAR + 12}" '
            f'text-anchor="middle">{brief(tick)}</text>'
            for i, tick in enumerate(self.ticks())
        )
        svg = (
            f'<text class="soft" y="10">{visible(self.words)}</text><rect class="floor" y="{LINE}" width="{width}" '
            f'height="{BAR}"/>{cells}{names}'
        )
        return Legend(svg, max(width, CHARACTER * cell_len(self.words)), LINE + BAR + 23)

    def legend_of_keys(self) -> Legend:
        values, meanings = zip(*self.keys)
        cell = f'width="16" height="{BAR}"'
        rows = "".join(
            f'<g transform="translate(0 {LINE * i})"><rect class="floor" {cell}/><rect class="more" {cell} '
            f'opacity="{strength:.2f}"/><text class="soft" x="22" y="10">{visible(meaning)}</text></g>'
            for i, (meaning, strength) in enumerate(zip(meanings, self.strength(np.array(values))))
        )
        return Legend(rows, 22 + CHARACTER * max(map(cell_len, meanings)), LINE * len(meanings) + 5)

    def text(self) -> list[str]:
        """The legend as lines of text for a terminal."""
        if self.keys:
            values, meanings = zip(*self.keys)
            return ["   ".join(f"{SHADES[i]} {meaning}" for i, meaning in zip(self.levels(np.array(values)), meanings))]
        quarters = replace(self, signed=False).ticks()[1:]
        reach = lambda sign, marks: [f"{mark} to {sign}{brief(value)}" for mark, value in zip(marks[1:], quarters)]
        lines = ["   ".join([f"{SHADES[0]} 0", *reach("", SHADES)])]
        return [self.words, *lines, *(["   ".join(["   ", *reach("-", NEGATIVE)])] if self.signed else [])]


def legends(scales: Iterable[ColorScale | None]) -> list[ColorScale]:
    """The distinct scales that have a legend, clipped if the values of any panel exceed them."""
    distinct: dict[ColorScale, bool] = {}
    for scale in scales:
        if scale and (scale.unit or scale.keys):
            plain = replace(scale, clipped=False)
            distinct[plain] = distinct.get(plain, False) or scale.clipped
    return [replace(scale, clipped=clipped) for scale, clipped in distinct.items()]


def brief(value: float) -> str:
    """Three significant digits or, if that takes more than five characters, two."""
    text = f"{value:.3g}"
    return text if len(text) <= 5 else f"{value:.2g}"
