"""Text as HTML: escaping, tables, and page templates."""

import base64
import html
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import islice
from typing import Any

MARKS = {" ": "·", "\n": "↵", "\t": "⇥"}  # white space in a token
KEPT = {"\n": "\n", "\t": "\t"}  # control characters that are kept in a text
ROWS = 200  # largest number of rows of a table


def readable(text: str, marks: Mapping[str, str]) -> str:
    """Replace keys of `marks` with their marks, and other control characters and unpaired surrogates with escapes."""
    hidden = lambda c: unicodedata.category(c) in ("Cc", "Cs")
    return "".join(marks.get(c) or (c.encode("unicode_escape").decode() if hidden(c) else c) for c in text)


def visible(text: str, marks: Mapping[str, str] = KEPT) -> str:
    """The result of `readable`, escaped for HTML."""
    return html.escape(readable(text, marks))


def embedded(value: Any) -> str:
    """JSON for a script element, with `<` escaped, so that no text in the value can close the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """An HTML table of at most ROWS rows; the first cell of each row is its heading."""
    head = "".join(f"<th>{visible(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr><th>{visible(name)}</th>{''.join(f'<td>{visible(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in islice(rows, ROWS)
    )
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def details(title: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table that opens on a click on `title`; "" without rows."""
    return f"<details><summary>{visible(title)}</summary>{table(rows, header)}</details>" if rows else ""


def boxed(svg: str, title: str) -> str:
    """An SVG as an image in a scrolling box for notebooks: it keeps its own styles, and follows the color scheme."""
    data = base64.b64encode(svg.encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{visible(title)}" style="max-width:none">'
    return f'<div style="overflow-x:auto">{image}</div>'


def resource(name: str) -> str:
    """Content of a text file in `onward.reports`, such as report.css."""
    return files("onward.reports").joinpath(name).read_text(encoding="utf-8")


def filled(template: str, parts: Mapping[str, str]) -> str:
    """Replace each `<!--name-->` by its part, and remove `<!--if name-->` to `<!--end-->` if the part is empty."""
    kept = re.sub(r"<!--if (\w+)-->(.*?)<!--end-->", lambda m: m[2] if parts[m[1]] else "", template, flags=re.S)
    return re.sub(r"<!--(\w+)-->", lambda m: parts[m[1]], kept)


def page_of(body: str, parts: Mapping[str, str]) -> str:
    """A self-contained page with the template `body`; parts include title and style, and may include data and
    script."""
    return filled(resource("page.html"), {"data": "null", "script": "", **parts, "body": filled(resource(body), parts)})
