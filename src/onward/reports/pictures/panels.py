"""The panels of pictures: cells of a matrix, curves, bars, and shaded words; each as SVG and as lines for a
terminal."""

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.cells import cell_len

from onward.reports.pictures.markup import readable, visible
from onward.reports.pictures.picture import LINE_MARKS, Panel, fitted, gray_png, padded
from onward.reports.pictures.plot import Frame, Heights, Series, plot, rounded, short
from onward.reports.pictures.scale import NEGATIVE, SHADES, ColorScale

LABEL, DEEP = 6.7, 12  # width of a character of a label in pixels, largest number of characters
BLOCKS = "▁▂▃▄▅▆▇█"
ROW = 17  # height of a row of the legend of curves in pixels
STYLES = "smooth", "validation", "other", "fourth", "fifth", "sixth"  # CSS classes of curves
COLUMNS = 56  # width of a curve in a terminal
WIDEST, FOLDED = 64, 92  # in a terminal: largest number of rows or columns without texts, largest width with texts
BAR = 190.0  # width of the longest bar in pixels


def cells(
    title: str,
    values: ArrayLike,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    *,
    scale: ColorScale | None = None,
    room: float = 400,
    texts: Sequence[Sequence[str]] | None = None,
    longest: int = DEEP,
    reading: str = "",
) -> Panel:
    """Return a panel that draws a matrix (R, C) as cells shaded by value; NaN stays blank.

    `rows` and `columns` are labels; as many are drawn as are legible. `scale` maps values to shades, by default up to
    the largest absolute value. `room` limits the total width of the cells, in pixels, unless `texts` need more. `texts`
    (R, C) are printed in the cells, at most `longest` characters each. `reading` is the sentence shown for the cell
    under the pointer, such as "{row} attends to {column}: {value}".
    """
    values = np.asarray(values, float)
    scale = scale or ColorScale(float(np.nanmax(np.abs(values), initial=0)), bool((values < 0).any()), unit="value")
    scale = replace(scale, faint=scale.faint or texts is not None).over(values)
    (height, width), size, labels = values.shape, 0.0, list[list[str]]()
    if texts is not None:
        labels = [[fitted(text, longest) for text in line] for line in texts]
        size = text_width(labels)
    across = max(size, min(22.0, room / max(width, 1)))
    down = 20.0 if texts is not None else min(across, 22.0)
    shown = [fitted(label, DEEP) for label in rows], [fitted(label, DEEP) for label in columns]
    left = LABEL * max(map(cell_len, shown[0]), default=0) + 8 * bool(rows)
    upright = bool(columns) and across >= LABEL * max(map(cell_len, shown[1])) + 4
    below = 18.0 if upright else LABEL * max(map(cell_len, shown[1]), default=0) + 8 * bool(columns)
    parts = [f'<path class="floor" d="{floor(values)}" transform="scale({across:g} {down:g})"/>']
    for style, sign in (("more", 1), ("less", -1)):
        strength = np.round(255 * scale.strength(np.where(values * sign > 0, values, 0))).astype(np.uint8)
        if strength.any():
            parts.append(shade(style, strength, across, down))
    for row, line in enumerate(labels):
        parts += [
            f'<text class="label" x="{(column + 0.5) * across:.1f}" y="{(row + 0.5) * down + 4:.1f}" '
            f'text-anchor="middle" style="fill:var(--ink)">{visible(text)}</text>'
            for column, text in enumerate(line)
            if text
        ]
    every = [math.ceil(11 / down), 1 if upright else math.ceil(11 / across)]
    parts += [
        f'<text class="label" x="-6" y="{(i + 0.5) * down + 4:.1f}" text-anchor="end">{visible(label)}</text>'
        for i, label in enumerate(shown[0])
        if i % every[0] == 0
    ]
    for i, label in enumerate(shown[1]):
        x, y = (i + 0.5) * across, height * down
        place = f'x="{x:.1f}" y="{y + 14:.1f}" text-anchor="middle"'
        if not upright:
            place = f'transform="translate({x + 4:.1f} {y + 6:.1f}) rotate(-90)" text-anchor="end"'
        if i % every[1] == 0:
            parts.append(f'<text class="label" {place}>{visible(label)}</text>')
    hit = f'<rect class="hit" width="{across * width:g}" height="{down * height:g}"/>'
    data = {"rows": [*rows], "columns": [*columns], "values": finite(values)} | ({"texts": texts} if texts else {})
    return Panel(
        title,
        max(left + across * width, 7.2 * cell_len(title)),
        down * height + below,
        f'<g transform="translate({left:g} 0)">{"".join(parts)}{hit}</g>',
        cell_lines(values, rows, columns, scale, labels if texts is not None else None),
        data | ({"reading": reading} if reading else {}),
        scale,
    )


def text_width(texts: Sequence[Sequence[str]]) -> float:
    """The width in pixels of a cell in which each of `texts` fits."""
    return max((cell_len(text) for line in texts for text in line), default=1) * LABEL + 8


def floor(values: np.ndarray) -> str:
    """An SVG path over the cells that are not NaN, one unit each, as the background below the shades."""
    path = ""
    for y, known in enumerate(~np.isnan(values)):
        edges = np.flatnonzero(np.diff(np.pad(known.astype(int), 1)))
        path += "".join(f"M{first} {y}H{last}v1H{first}z" for first, last in edges.reshape(-1, 2))
    return path


def shade(style: str, strength: np.ndarray, across: float, down: float) -> str:
    """Cells in the color of the class `style`, with opacities (R, C) from 0 to 255. They are an image that masks a
    colored area: the color can follow the theme, and an SVG of 256 x 256 cells stays small."""
    rows, columns = strength.shape
    image = gray_png(strength)
    name = f"m{zlib.crc32(image + repr((style, across, down)).encode()):08x}"
    size = f'width="{across * columns:g}" height="{down * rows:g}"'
    return (
        f'<mask id="{name}" maskUnits="userSpaceOnUse" x="0" y="0" {size}><image {size} preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{base64.b64encode(image).decode()}"/></mask>'
        f'<rect class="{style}" {size} mask="url(#{name})"/>'
    )


def cell_lines(
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    scale: ColorScale,
    texts: Sequence[Sequence[str]] | None,
) -> list[str]:
    """Lines of a matrix for a terminal: shading characters or, if given, the `texts` of the cells."""
    if texts is None and max(values.shape) > WIDEST:  # each character represents several rows and columns
        every = math.ceil(max(values.shape) / WIDEST)
        rows, columns = rows[::every], columns[::every] if [*columns] != [*rows] else rows[::every]
        values = pooled(values, every)
    names = padded(rows) if rows else [""] * len(values)
    margin = cell_len(names[0]) if names else 0
    levels = scale.levels(values)
    shades = np.where(values < 0, np.array([*NEGATIVE])[levels], np.array([*SHADES])[levels])
    shades = np.where(np.isnan(values), " ", shades)
    if texts is not None:
        if scale.signed:  # the texts are numbers, whose signs would be confused with those of the shades
            shades = np.full_like(shades, "")
        table = [[text + mark.replace("·", " ") for text, mark in zip(*line)] for line in zip(texts, shades)]
        table = [[*(fitted(label, DEEP) + " " * (not scale.signed) for label in columns)]] * bool(columns) + table
        widths = [max(map(cell_len, column)) for column in zip(*table)]
        fit = next((i for i in range(len(widths)) if sum(widths[i:]) + 2 * len(widths[i:]) <= FOLDED), len(widths) - 1)
        table, widths = [line[fit:] for line in table], widths[fit:]  # the last columns that fit
        lines = [
            "  ".join(" " * (width - cell_len(text)) + text for text, width in zip(line, widths)) for line in table
        ]
        names = [" " * margin] * bool(columns) + names
        return [f"{name}  {line}".rstrip() for name, line in zip(names, lines)]
    repeat = 2 if values.shape[1] <= 24 else 1
    lines = [f"{name} {''.join(mark * repeat for mark in line)}" for name, line in zip(names, shades)]
    if columns and [*columns] != [*rows]:
        every = max(1, math.ceil(6 / repeat))
        ruler = "".join(fitted(label, every * repeat - 1).ljust(every * repeat) for label in columns[::every])
        lines.append(f"{' ' * margin} {ruler}".rstrip())
    return lines


def pooled(values: np.ndarray, every: int) -> np.ndarray:
    """Each square of `every` x `every` cells becomes its value farthest from 0; NaN if all cells are."""
    rows, columns = (-size % every for size in values.shape)
    padded_values = np.pad(values, ((0, rows), (0, columns)), constant_values=np.nan)
    squares = padded_values.reshape(-(-len(values) // every), every, -1, every).swapaxes(1, 2)
    flat = squares.reshape(*squares.shape[:2], -1)
    farthest = np.argmax(np.nan_to_num(np.abs(flat), nan=-1), -1)
    return np.take_along_axis(flat, farthest[..., None], -1)[..., 0]


def curves(
    title: str,
    x: Sequence[float],
    series: Mapping[str, ArrayLike],
    *,
    x_name: str,
    log: bool = False,
    marks: Mapping[str, float] = {},
    ranges: Mapping[str, tuple[ArrayLike, ArrayLike]] = {},
    dots: Sequence[tuple[float, float]] = (),
    size: tuple[float, float] = (420, 250),
) -> Panel:
    """Return a panel that draws named curves over the same coordinates `x`, with a logarithmic vertical axis if `log`;
    `x_name` is the title of the horizontal axis.

    `series` maps the name of each curve to its heights, and `marks` maps the label of each vertical line to its x.
    `ranges` maps the name of a curve to (least values, greatest values), drawn as a band around the curve; `dots` are
    single points (x, y). `size` is (width, height) in pixels, without the legend.
    """
    width, height = size
    domain = np.array([[min(x), max(x)]] * 3, float)
    rows = legend_rows([*series], width)
    height += ROW * max(rows, default=0)
    frame = Frame(width, height, 48, width - 8, 34 + ROW * max(rows, default=0), height - 40, domain)
    numbers = {name: np.asarray(values, float) for name, values in series.items()}
    bands = {name: [np.asarray(end, float) for end in ends] for name, ends in ranges.items()}
    points = np.array(dots, float).reshape(-1, 2)
    every = np.concatenate([points[:, 1], *numbers.values(), *(end for ends in bands.values() for end in ends)])
    every = every[np.isfinite(every)]
    low, high = float(every.min()), float(every.max())
    margin = 0.05 * (high - low) or 1.0
    y = Heights(frame, low / 1.1, high * 1.1, log=True) if log else Heights(frame, low - margin, high + margin)
    coordinates = np.stack([np.asarray(x, float)] * 3)
    drawn = []
    for i, (name, values) in enumerate(numbers.items()):
        few = len(series) <= len(STYLES)  # if there are more, shades of the first color
        style, opacity = (STYLES[i], 1.0) if few else (STYLES[0], 1 - 0.8 * i / len(series))
        known = np.isfinite(values)
        drawn.append(Series(style, "line", coordinates[:, known], y(values[known]), name, opacity=opacity))
    names = "".join(
        f'<tspan class="{curve.style}-name" opacity="{curve.opacity:.2g}" '
        f'{"dx" if row == before else "x"}="{14 if row == before else 0}" y="{12 + ROW * row}">&#9644;</tspan>'
        f'<tspan class="{curve.style}-name"> {visible(curve.name)}</tspan>'
        for curve, row, before in zip(drawn, rows, [-1, *rows])
    )
    around = f"<text>{names}</text>{y.grid(5)}"
    around += f'<text x="{frame.right:g}" y="{height - 6:g}" text-anchor="end">{visible(x_name)}</text>'
    for name, at in marks.items():
        place = float(frame.x(np.array([[at]]))[0])
        left = place > 0.7 * width  # the name is left of the mark
        around += (
            f'<path class="rollback" d="M{place:.1f} {frame.top:g}V{frame.bottom:g}"/>'
            f'<text x="{place + (-5 if left else 5):.1f}" y="{frame.top + 10:g}" '
            f'text-anchor="{"end" if left else "start"}">{visible(name)}</text>'
        )
    around += "".join(band(curve, bands[curve.name], coordinates, y) for curve in drawn if curve.name in bands)
    drawn.append(Series("dots", "dots", np.stack([points[:, 0]] * 3), y(points[:, 1])))
    svg, _ = plot(frame, drawn, around, visible(title), 6)
    inner = svg[svg.index(">") + 1 : -len("</svg>")]
    hit = (
        f'<rect class="hit" x="{frame.left:g}" y="{frame.top:g}" width="{frame.right - frame.left:g}" '
        f'height="{frame.bottom - frame.top:g}"/>'
    )
    longest = max(map(cell_len, series))
    lines = [f"{name:<{longest}} {curve_line(y(values), frame)}" for name, values in numbers.items()]
    lines.append(f"{'':{longest}} {x_name} {short(min(x))} to {short(max(x))}; values {low:.4g} to {high:.4g}")
    data = {
        "x": rounded(coordinates[0]),
        "x_name": x_name,
        "series": {name: finite(values) for name, values in numbers.items()},
    } | ({"dots": points.tolist()} if dots else {})
    return Panel(title, width, height, f'<g class="plot">{inner}{hit}</g>', lines, data)


def legend_rows(names: Sequence[str], width: float) -> list[int]:
    """The legend row of each name, from 0, for rows of `width` pixels."""
    rows, used = list[int](), 0.0
    for name in names:
        size = LABEL * (cell_len(name) + 2) + 14
        fits = used + size <= width
        rows.append(rows[-1] + (not fits) if rows else 0)
        used = size + (used if fits else 0)
    return rows


def band(curve: Series, ends: Sequence[np.ndarray], coordinates: np.ndarray, y: Heights) -> str:
    """The range (least, greatest values) around a curve as an area in its color."""
    known = np.isfinite(ends[0])
    x = y.frame.x(coordinates[:, known])
    low, high = (y(end[known]) for end in ends)
    around = zip(np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]]))
    d = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in around) + "Z" if known.any() else ""
    return f'<path class="{curve.style}-name" style="stroke:none;fill-opacity:{curve.opacity * 0.16:.2g}" d="{d}"/>'


def curve_line(heights: np.ndarray, frame: Frame) -> str:
    """A curve for a terminal as one line of block characters."""
    parts = np.array_split(heights, min(COLUMNS, len(heights)))
    share = (frame.bottom - np.array([part.mean() for part in parts])) / (frame.bottom - frame.top)
    return "".join(BLOCKS[int(s * 7.999)] for s in np.clip(np.nan_to_num(share), 0, 1))


def bars(title: str, values: Mapping[str, float], *, unit: str = "", marked: str = "", top: float = 0) -> Panel:
    """Return a panel with a bar for each named value, in `unit` ("%": shares as percentages). A negative value's bar,
    and the bar named `marked`, have the second color. `top` is the absolute value of a bar of full length; 0: the
    largest."""
    top = top or max((abs(value) for value in values.values()), default=0) or 1.0
    names = [fitted(name, 18) for name in values]
    left = LABEL * max(map(cell_len, names), default=0) + 10
    parts = []
    for i, (name, value) in enumerate(zip(names, values.values())):
        y, width = 19 * i, max(BAR * abs(value) / top, 1.0) if value else 0.0
        style = "less" if value < 0 or [*values][i] == marked else "more"
        parts.append(
            f'<text class="label" x="{left - 6:.1f}" y="{y + 12}" text-anchor="end">{visible(name)}</text>'
            f'<rect class="{style}" x="{left:.1f}" y="{y + 1}" width="{width:.1f}" height="14" rx="2"/>'
            f'<text class="number soft" x="{left + width + 6:.1f}" y="{y + 12}">{visible(number(value, unit))}</text>'
        )
    lines = [
        f"{name} {'█' * max(round(24 * abs(value) / top), int(value != 0))} {number(value, unit)}"
        for name, value in zip(padded(names, 18), values.values())
    ]
    width = left + BAR + 12 + 7 * max((len(number(value, unit)) for value in values.values()), default=0)
    return Panel(title, width, 19.0 * len(values), "".join(parts), lines, {"bars": dict(values), "unit": unit})


def words(
    title: str,
    pieces: Sequence[str],
    values: np.ndarray,
    notes: Sequence[str],
    scale: ColorScale,
    below: Sequence[str] = (),
    width: float = 760,
) -> Panel:
    """Return a panel that draws the tokens of a text, each shaded by its value on `scale`, in rows of `width` pixels;
    `pieces` are the texts of the tokens.

    `below` are short texts, one under each token. `notes`, one for each token, appear under the pointer; in a terminal
    each note follows its token.
    """
    scale, parts, x, y = replace(scale, faint=True).over(values), [], 0.0, 0.0
    down = 38 if any(below) else 23
    for piece, note, under, strength in zip(pieces, notes, below or [""] * len(pieces), scale.strength(values)):
        size = max(LABEL * cell_len(readable(piece, LINE_MARKS)) + 8, LABEL * len(under))
        if x and x + size > width:
            x, y = 0.0, y + down
        parts.append(
            f'<g><title>{visible(f"{piece}: {note}")}</title><rect class="floor" x="{x:.1f}" y="{y:g}" '
            f'width="{size:.1f}" height="20" rx="3"/><rect class="more" x="{x:.1f}" y="{y:g}" width="{size:.1f}" '
            f'height="20" rx="3" opacity="{strength:.2f}"/><text class="label" x="{x + 4:.1f}" y="{y + 14:g}" '
            f'style="fill:var(--ink)">{visible(piece)}</text>'
            + (f'<text class="number soft" x="{x + 4:.1f}" y="{y + 32:g}">{visible(under)}</text>' if under else "")
            + "</g>"
        )
        x += size + 3
    marks = np.array([*SHADES])[scale.levels(values)]
    lines = [f"{name} {mark} {note}" for name, mark, note in zip(padded(pieces, 16), marks, notes)]
    data = {"words": [*pieces], "values": [finite(values)], "notes": [*notes]}
    return Panel(title, width, y + down + 1, "".join(parts), lines, data, scale)


def unique(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Values by names; a repeated name gets a number, such as `the (2)`, so that no value is lost."""
    named: dict[str, float] = {}
    for name, value in zip(names, values):
        label, count = name, 1
        while label in named:
            count += 1
            label = f"{name} ({count})"
        named[label] = value
    return named


def number(value: float, unit: str) -> str:
    return f"{value:.1%}".replace("%", " %") if unit == "%" else f"{value:.4g} {unit}".rstrip()


def finite(values: np.ndarray) -> list[Any]:
    """Nested lists of five significant digits; None for values that are not finite."""
    if values.ndim > 1:
        return [finite(row) for row in values]
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]
