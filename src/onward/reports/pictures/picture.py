"""Pictures: panels with a title and a caption, as SVG, PDF, PNG, HTML, JSON, CSV, or text for a terminal."""

import json
import math
import re
import struct
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from resvg_py import svg_to_bytes
from rich.cells import cell_len, set_cell_size

from onward.base.errors import UserError
from onward.base.files import atomic_write, writable_ending
from onward.reports.pictures.markup import MARKS, boxed, embedded, page_of, readable, resource, visible
from onward.reports.pictures.numbers import csv_of, values_of
from onward.reports.pictures.pdf import ZOOM, pdf_of
from onward.reports.pictures.plot import COLORS, STYLE
from onward.reports.pictures.scale import ColorScale, legends

FORMATS = ".svg", ".pdf", ".png", ".html", ".json", ".csv"
Theme = Literal["auto", "light", "dark"]  # auto: as the reader's system; a PNG or PDF is then light
PANEL_STYLE = """
.picture { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink) }
.picture .paper { fill: var(--paper) } .picture .floor { fill: var(--panel) }
.picture .edge { fill: none; stroke: var(--line) }
.picture .title { font-size: 17px; font-weight: 600 } .picture .name { font-weight: 600 }
.picture .soft, .picture .caption { fill: var(--soft) } .picture .caption { font-size: 13px }
.picture .label { font: 11px ui-monospace, Menlo, "DejaVu Sans Mono", monospace; fill: var(--soft); white-space: pre }
.picture .number { font-size: 11px; font-variant-numeric: tabular-nums }
.picture .more { fill: var(--accent) } .picture .less { fill: var(--second) } .picture .third { fill: var(--third) }
.picture .stroke { fill: none; stroke: var(--accent); stroke-width: 2 } .picture .hit { fill: transparent }
.picture .plot path.validation { stroke-width: 2; stroke-dasharray: 6 4 }
.picture .before { fill: var(--line) } .picture .after { fill: var(--accent) }
.picture .box { fill: var(--panel); stroke: var(--line) } .picture .stem { fill: var(--paper); stroke: var(--accent) }
.picture .arrow { fill: none; stroke: var(--soft); stroke-width: 1.3 }
"""
WIDEST, NARROWEST = 1000.0, 560.0  # pixels: width in which panels share a row, smallest width of a picture
MARGIN, GAP, TITLE, LINE = 18.0, 30.0, 20.0, 18.0  # pixels: around panels, between them, above them, per text line
LINE_MARKS = {"\n": MARKS["\n"], "\t": MARKS["\t"]}
POINTED = 'class="hit"', "<title>"  # markup of elements with a value or text for the pointer
LETTER = '<text y="15">x</text>'
MOST_VALUES = 4096  # largest number of values of a panel on a page; see `pointed` for larger panels


@dataclass(frozen=True)
class Panel:
    """One panel as SVG, as lines for a terminal, and as numbers."""

    title: str
    width: float  # width in pixels
    height: float
    body: str  # SVG elements, starting at the origin
    text: Sequence[str]  # the same picture as lines for a terminal
    data: Mapping[str, Any] = field(default_factory=dict)  # the numbers shown, for JSON, CSV and the pointer
    scale: ColorScale | None = None  # scale of the cells, for the legend


@dataclass(frozen=True)
class Picture:
    """A picture of Onward's reports: panels in rows, under a title and over a caption that explains them."""

    title: str
    caption: str
    panels: Sequence[Panel]

    @property
    def legends(self) -> list[ColorScale]:
        return legends(panel.scale for panel in self.panels)

    def write(self, path: Path, theme: Theme = "auto") -> None:
        """Write the picture as SVG, PDF, PNG or HTML, or its numbers as JSON or CSV, by the ending of the path. Raises
        a UserError for any other ending."""
        match format_of(path):
            case ".svg":
                content: bytes = self.svg(theme).encode()
            case ".png":
                content = png_of(self.svg("dark" if theme == "dark" else "light"))
            case ".pdf":
                content = pdf_of(png_of(self.svg("dark" if theme == "dark" else "light"), ZOOM, "white"))
            case ".html":
                content = self.html(theme).encode()
            case ".json":
                content = (json.dumps(self.values(), indent=2) + "\n").encode()
            case ".csv":
                content = csv_of([row for p in self.panels for row in values_of(p.title, p.data)]).encode()
        with atomic_write(path) as new:
            new.write_bytes(content)

    def values(self) -> dict[str, Any]:
        """Return the title, the caption and the numbers of every panel as a JSON object."""
        panels = [{"title": panel.title, **panel.data} for panel in self.panels]
        return {"title": self.title, "caption": self.caption, "panels": panels}

    def svg(self, theme: Theme = "auto", alone: bool = True) -> str:
        """Return the picture as SVG: a complete file with title, caption and colors if `alone`, else an element for a
        page that provides these."""
        rows = [*in_rows(self.panels, [panel.width for panel in self.panels], WIDEST - 2 * MARGIN, GAP)]
        widths = [sum(panel.width + GAP for panel in row) - GAP for row in rows]
        drawn = [scale.legend() for scale in self.legends]
        width = max(NARROWEST, max([*widths, *(legend.width for legend in drawn)], default=0) + 2 * MARGIN)
        parts, y = [], MARGIN
        if alone:
            parts.append(f'<text class="title" x="{MARGIN:g}" y="{y + 14:g}">{visible(self.title)}</text>')
            y += 36
        for row in rows:
            x, named = MARGIN, TITLE * any(panel.title for panel in row)
            for panel in row:
                parts.append(
                    f'<g class="panel" transform="translate({x:g} {y + named:g})">'
                    f'<text class="name" y="-8">{visible(panel.title)}</text>{panel.body}</g>'
                )
                x += panel.width + GAP
            y += max(panel.height for panel in row) + named + GAP - 10
        for legend in drawn:
            parts.append(f'<g transform="translate({MARGIN:g} {y:g})">{legend.svg}</g>')
            y += legend.height
        if alone:
            for line in textwrap.wrap(self.caption, int((width - 2 * MARGIN) / 6.9)):
                parts.append(f'<text class="caption" x="{MARGIN:g}" y="{y + 14:g}">{visible(line)}</text>')
                y += LINE
        y += MARGIN
        size = f'viewBox="0 0 {width:g} {y:g}"'
        if not alone:
            shape = f'{size} style="--width:{width:g}px;max-width:{1.15 * width:.0f}px"'
            return f'<svg {shape} class="picture" role="img" aria-label="{visible(self.title)}">{"".join(parts)}</svg>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} width="{width:g}" height="{y:g}" class="picture"'
        style = f"<style>{colors(theme)}{STYLE}{PANEL_STYLE}</style>"
        paper = f'<rect class="paper" width="{width:g}" height="{y:g}" rx="8"/>'
        return (
            f'{head} role="img" aria-label="{visible(self.title)}">{style}{paper}\n' + "\n".join(parts) + "\n</svg>\n"
        )

    def html(self, theme: Theme = "auto") -> str:
        """Return the picture as a self-contained HTML page that shows the value under the pointer."""
        return page_of(
            "pictures/picture.html",
            {
                "title": visible(self.title),
                "style": colors(theme) + STYLE + PANEL_STYLE + resource("report.css"),
                "picture": self.svg(alone=False),
                "pointed": "values" * any(mark in panel.body for panel in self.panels for mark in POINTED),
                "caption": visible(self.caption),
                "data": embedded([pointed(panel) for panel in self.panels]),
                "script": resource("pictures/picture.js"),
            },
        )

    def _repr_html_(self) -> str:
        return boxed(self.svg(), self.title)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "image/svg+xml": self.svg(), "text/plain": self.text()}

    def text(self, width: int = 100) -> str:
        """Return the picture as text for a terminal of `width` columns."""
        lines = [readable(self.title, LINE_MARKS), ""]
        blocks = [
            [readable(line, LINE_MARKS) for line in ([panel.title] if panel.title else []) + [*panel.text]]
            for panel in self.panels
        ]
        sizes = [max(map(cell_len, block), default=0) for block in blocks]
        for row in in_rows(list(zip(blocks, sizes)), sizes, width, 3):
            for i in range(max(len(block) for block, _ in row)):
                line = (set_cell_size(block[i] if i < len(block) else "", size) for block, size in row)
                lines.append("   ".join(line).rstrip())
            lines.append("")
        for scale in self.legends:
            lines += [*scale.text(), ""]
        lines += textwrap.wrap(readable(self.caption, LINE_MARKS), min(width, 100))
        return "\n".join(lines)


def legend_of(scale: ColorScale) -> str:
    """A legend as an SVG element, for a page that provides the colors."""
    svg, width, height = scale.legend()
    size = f'viewBox="0 0 {width:g} {height:g}" style="--width:{width:g}px;max-width:{width:.0f}px"'
    return f'<svg {size} class="picture" role="img" aria-label="{visible(scale.words)}">{svg}</svg>'


def format_of(path: Path) -> str:
    return writable_ending(path, *FORMATS)


def pointed(panel: Panel) -> dict[str, Any]:
    """Numbers from which the page's script shows the value under the pointer. For a large panel, the script reads them
    from the panel's image instead, to a 255th of the scale, unless they are signed or exceed the scale."""
    data, scale = {"title": panel.title, **panel.data}, panel.scale
    size = len(data.get("values", ())) * len(data.get("columns", ()))
    if scale is None or scale.signed or scale.clipped or size <= MOST_VALUES:
        return data
    return {name: value for name, value in data.items() if name != "values"} | {
        "size": [len(data["values"]), len(data["columns"])],
        "top": scale.top,
        "full": scale.full,
        "root": scale.root,
    }


def in_rows(items: Sequence[Any], widths: Sequence[float], most: float, gap: float) -> Iterator[list[Any]]:
    """Divide items into rows at most `most` wide; a wider item has a row to itself. Items of equal width are spread
    evenly over the rows."""
    if len({*widths}) == 1:
        rows = math.ceil(len(items) / max(1, (most + gap) // (widths[0] + gap)))
        most = min(most, math.ceil(len(items) / rows) * (widths[0] + gap))
    row: list[Any] = []
    used = 0.0
    for item, width in zip(items, widths):
        if row and used + width > most:
            yield row
            row, used = [], 0.0
        row.append(item)
        used += width + gap
    if row:
        yield row


def colors(theme: Theme) -> str:
    """CSS variables of a theme's colors."""
    light, dark = COLORS.split("@media")
    if theme == "auto":
        return COLORS
    return light.replace("light dark", "light") if theme == "light" else ":root {" + dark.split("{ :root {")[1][:-2]


def png_of(svg: str, zoom: int = 2, background: str | None = None) -> bytes:
    """PNG with `zoom` pixels per SVG unit, transparent around the paper without a `background`; raises a UserError if
    the machine has no fonts."""
    values = dict(re.findall(r"--(\w+): (#\w+)", svg))
    plain = re.sub(r"var\(--(\w+)\)", lambda match: values[match[1]], svg)

    def render(source: str) -> bytes:  # resvg's own default fonts, Arial and Times, are missing on many machines
        return bytes(
            svg_to_bytes(
                svg_string=source,
                zoom=zoom,
                background=background,
                sans_serif_family="DejaVu Sans",
                font_family="DejaVu Sans",
            )
        )

    blank, letter = (f'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{x}</svg>' for x in ("", LETTER))
    if render(blank) == render(letter):
        raise UserError(
            "Cannot draw the labels of a PNG or PDF, because this machine has no fonts: install "
            "some, such as DejaVu, or write an .svg"
        )
    return render(plain)


def gray_png(gray: np.ndarray) -> bytes:
    """A grayscale image (R, C) of uint8 as PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows, columns = gray.shape
    lines = np.pad(gray, ((0, 0), (1, 0))).tobytes()  # each line begins with its filter, 0
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")


def fitted(label: str, most: int) -> str:
    """A label on one line, cut to `most` terminal columns with an ellipsis."""
    label = readable(label, LINE_MARKS)
    return label if cell_len(label) <= most else set_cell_size(label, most - 1) + "…"


def padded(labels: Iterable[str], most: int = 12) -> list[str]:
    """Labels of one width, flush right, cut to `most` terminal columns."""
    short = [fitted(label, most) for label in labels]
    width = max(map(cell_len, short), default=0)
    return [" " * (width - cell_len(label)) + label for label in short]
