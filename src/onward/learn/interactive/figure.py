"""Interactive figures of the chapters: numbers from Python, and a script that draws them and responds to sliders.

A figure has the same HTML on the site, in a notebook and on a separate page. Its file, such as 09-samplers.json next
to the chapter, holds its texts and numbers; `python -m docs.site.outputs` writes it.
"""

import html
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from onward.base.files import atomic_write, writable_ending
from onward.learn.cells import FIGURE
from onward.learn.chapters import Chapter
from onward.reports.pictures.markup import embedded, filled, resource, visible
from onward.reports.pictures.plot import COLORS

FOLDER = files("onward.learn.interactive")
SHARED = ("pictures/sampling.js",)  # scripts of the reports that figures also use
PAGE = """:root { color-scheme: light dark }
body { margin: 0 auto; max-width: 46rem; padding: .25rem; font: 16px/1.5 system-ui, sans-serif }
"""


@dataclass(frozen=True)
class InteractiveFigure:
    """A figure with sliders; `data` holds the values that it draws. A notebook displays it, and `write` saves it as a
    page or as JSON."""

    kind: str  # such as samplers, which samplers.js draws
    title: str
    about: str  # how to read or use the figure
    data: Mapping[str, Any]  # JSON

    def html(self) -> str:
        """The figure as an HTML element for a page that has `style` and `script`; on one line, as Markdown requires."""
        return (
            f'<figure class="interactive" data-kind="{self.kind}"><figcaption><strong>{visible(self.title)}</strong> '
            f'{visible(self.about)}</figcaption><p class="off">This figure needs JavaScript.</p>'
            f'<script type="application/json">{embedded(self.data)}</script></figure>'
        )

    def page(self) -> str:
        """The figure as a self-contained HTML page."""
        return page_of(self.html(), visible(self.title))

    def write(self, path: Path) -> None:
        """Write the figure as a page (.html) or as JSON (.json)."""
        ending = writable_ending(path, ".html", ".json")
        with atomic_write(path) as new:
            text = self.page() if ending == ".html" else json.dumps(asdict(self), separators=(",", ":")) + "\n"
            new.write_text(text, encoding="utf-8")

    def _repr_html_(self) -> str:
        frame = 'style="width:100%;height:36rem;border:0"'  # the script adjusts the height
        return f'<iframe srcdoc="{html.escape(self.page())}" {frame} title="{visible(self.title)}"></iframe>'

    def __repr__(self) -> str:
        return f"Interactive figure: {self.title}"


def page_of(body: str, title: str = "Figures") -> str:
    """A self-contained page of figures."""
    parts = {"title": title, "style": PAGE + style(), "data": "null", "script": script()}
    return filled(resource("page.html"), {**parts, "body": f"<main>{body}</main>"})


def with_figures(chapter: Chapter, text: str, shown: Callable[[InteractiveFigure], str]) -> str:
    """The text of a chapter, with each interactive figure replaced by the result of `shown`."""
    return FIGURE.sub(lambda match: shown(read_figure(chapter.path.parent / match[1])), text)


@cache
def read_figure(path: Path) -> InteractiveFigure:
    """Read a figure that `InteractiveFigure.write` wrote as JSON."""
    return InteractiveFigure(**json.loads(path.read_text(encoding="utf-8")))


@cache
def style() -> str:
    """The CSS of all figures, whose colors are those of the reports and follow the color scheme of the page."""
    names = re.findall(r"--(\w+): (#\w+)", COLORS)
    half = len(names) // 2
    both = "; ".join(f"--{name}: light-dark({one}, {other})" for (name, one), (_, other) in zip(names, names[half:]))
    return f".interactive {{ {both} }}\n" + FOLDER.joinpath("figure.css").read_text(encoding="utf-8")


@cache
def script() -> str:
    """The JavaScript of all figures, as one function."""
    own = sorted((file for file in FOLDER.iterdir() if file.name.endswith(".js")), key=lambda f: f.name != "figure.js")
    parts = [*map(resource, SHARED), *(file.read_text(encoding="utf-8") for file in own)]
    return "(() => {\n" + "".join(parts) + "})()\n"
