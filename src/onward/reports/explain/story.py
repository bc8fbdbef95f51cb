"""Stories: a computation told in steps with texts, formulas and panels, for a terminal or as an interactive page."""

import html
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onward.base.files import atomic_write, writable_ending
from onward.reports.pictures.markup import embedded, page_of, resource, visible
from onward.reports.pictures.picture import PANEL_STYLE, Panel, Picture, Theme, colors


@dataclass(frozen=True)
class StoryStep:
    """One step of the forward pass that `onward explain` explains."""

    title: str
    shape: str  # shape of the result, for all tokens of the text
    formula: str
    text: str
    panels: Sequence[Panel] = ()


@dataclass(frozen=True)
class Story:
    """The steps of one token through a decoder, for a terminal or as a page."""

    title: str
    steps: Sequence[StoryStep]

    def text(self, width: int = 100) -> str:
        lines = [self.title]
        for number, step in enumerate(self.steps, 1):
            lines += ["", f"{number}. {step.title}   {step.shape}".rstrip()]
            lines += [f"   {step.formula}"] * bool(step.formula)
            lines += textwrap.wrap(step.text, min(width, 100) - 3, initial_indent="   ", subsequent_indent="   ")
            if step.panels:
                picture = Picture("", "", step.panels).text(width - 3).rstrip().splitlines()[2:]
                lines += ["", *(f"   {line}".rstrip() for line in picture)]
        return "\n".join(lines)

    def html(self, theme: Theme = "auto") -> str:
        articles = []
        for number, step in enumerate(self.steps, 1):
            picture = Picture(step.title, "", step.panels).svg(alone=False) if step.panels else ""
            picture = re.sub(r'(id="|url\(#)m', rf"\1s{number}m", picture)  # unique ids: a hidden mask has no effect
            formula = f'<p class="formula"><code>{visible(step.formula)}</code></p>' * bool(step.formula)
            articles.append(
                f"<article><h2>{number}. {visible(step.title)} <small>{visible(step.shape)}</small></h2>{formula}"
                f"<p>{visible(step.text)}</p><figure>{picture}</figure></article>"
            )
        return page_of(
            "explain/explain.html",
            {
                "title": visible(self.title),
                "style": colors(theme) + PANEL_STYLE + resource("report.css") + resource("explain/explain.css"),
                "steps": "".join(articles),
                "data": embedded([{"title": panel.title, **panel.data} for s in self.steps for panel in s.panels]),
                "script": resource("pictures/picture.js") + resource("explain/explain.js"),
            },
        )

    def _repr_html_(self) -> str:
        page = html.escape(self.html())
        return (
            f'<iframe srcdoc="{page}" style="width:100%;height:42rem;border:0" title="{visible(self.title)}"></iframe>'
        )

    def write(self, path: Path, theme: Theme = "auto") -> None:
        """Write the page (.html), or titles, shapes, texts and numbers (.json)."""
        if writable_ending(path, ".html", ".json") == ".json":
            steps = [
                {
                    "title": s.title,
                    "shape": s.shape,
                    "text": s.text,
                    "panels": [{"title": p.title, **p.data} for p in s.panels],
                }
                for s in self.steps
            ]
            content = json.dumps({"title": self.title, "steps": steps}, indent=2) + "\n"
        else:
            content = self.html(theme)
        with atomic_write(path) as new:
            new.write_text(content, encoding="utf-8")
