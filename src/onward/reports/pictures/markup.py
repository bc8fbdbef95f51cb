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
    """Make invisible characters of a text visible: replace each character that is a key of `marks` by the mark that is
    its value, and other control characters and unpaired surrogates by escapes."""
    hidden = lambda c: unicodedata.category(c) in ("Cc", "Cs")
    return "".join(marks.get(c) or (c.encode("unicode_escape").decode() if hidden(c) else c) for c in text)


def visible(text: str, marks: Mapping[str, str] = KEPT) -> str:
    """Make invisible characters of a text visible as `readable` does, by default except line breaks and tabs, and
    escape the text for HTML."""
    return html.escape(readable(text, marks))


def embedded(value: Any) -> str:
    """Return a value as JSON for a script element of an HTML page, with `<` escaped, so that no text inside the value
    can close the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return rows of cell texts as an HTML table, cut after ROWS rows, with `header` as the titles of the columns
    (empty: none). The first cell of each row is its heading."""
    head = "".join(f"<th>{visible(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr><th>{visible(name)}</th>{''.join(f'<td>{visible(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in islice(rows, ROWS)
    )
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def details(title: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return an HTML table of `rows` that opens and closes on a click on `title`, with `header` as the titles of the
    columns; "" without rows."""
    return f"<details><summary>{visible(title)}</summary>{table(rows, header)}</details>" if rows else ""


def boxed(svg: str, title: str) -> str:
    """Return an SVG as an image in a scrolling box, as HTML for notebooks; `title` is the alternative text. An image
    keeps its own styles and follows the system's color scheme."""
    data = base64.b64encode(svg.encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{visible(title)}" style="max-width:none">'
    return f'<div style="overflow-x:auto">{image}</div>'


def resource(name: str) -> str:
    """Return the content of a text file in the package `onward.reports`, such as report.css; `name` is its path
    there."""
    return files("onward.reports").joinpath(name).read_text(encoding="utf-8")


def filled(template: str, parts: Mapping[str, str]) -> str:
    """Fill a template: replace each `<!--name-->` by `parts[name]`, and remove the text between `<!--if name-->` and
    `<!--end-->` if that part is empty."""
    kept = re.sub(r"<!--if (\w+)-->(.*?)<!--end-->", lambda m: m[2] if parts[m[1]] else "", template, flags=re.S)
    return re.sub(r"<!--(\w+)-->", lambda m: parts[m[1]], kept)


def page_of(body: str, parts: Mapping[str, str]) -> str:
    """Return a self-contained HTML page whose body is the template file `body` of this package, filled with `parts`
    (texts by the names of their places). The parts include title and style, and may include data (JSON) and a
    script."""
    return filled(resource("page.html"), {"data": "null", "script": "", **parts, "body": filled(resource(body), parts)})
