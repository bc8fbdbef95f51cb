"""Text as HTML: escaped, with control characters made visible, as tables that unfold, and in the templates of pages."""

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
    """Text with `marks` for some characters. Control characters and stray surrogates are written as escapes."""
    hidden = lambda c: unicodedata.category(c) in ("Cc", "Cs")
    return "".join(marks.get(c) or (c.encode("unicode_escape").decode() if hidden(c) else c) for c in text)


def visible(text: str, marks: Mapping[str, str] = KEPT) -> str:
    """Text as `readable` returns it, escaped for HTML."""
    return html.escape(readable(text, marks))


def embedded(value: Any) -> str:
    """JSON for a script element. No text inside it can end the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """The first rows as a table; the first cell of each row is its name."""
    head = "".join(f"<th>{visible(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr><th>{visible(name)}</th>{''.join(f'<td>{visible(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in islice(rows, ROWS)
    )
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def details(title: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table that unfolds; "" without rows."""
    return f"<details><summary>{visible(title)}</summary>{table(rows, header)}</details>" if rows else ""


def boxed(svg: str, title: str) -> str:
    """A whole SVG as an image that scrolls in its own box and follows the colors of the system, for the page of
    another program: as an image, its styles stay its own."""
    data = base64.b64encode(svg.encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{visible(title)}" style="max-width:none">'
    return f'<div style="overflow-x:auto">{image}</div>'


def resource(name: str) -> str:
    """A file of this package."""
    return files("onward.reports").joinpath(name).read_text(encoding="utf-8")


def filled(template: str, parts: Mapping[str, str]) -> str:
    """A template with each `<!--name-->` replaced by the part of that name; what is between `<!--if name-->` and
    `<!--end-->` is left out where the part is empty."""
    kept = re.sub(r"<!--if (\w+)-->(.*?)<!--end-->", lambda m: m[2] if parts[m[1]] else "", template, flags=re.S)
    return re.sub(r"<!--(\w+)-->", lambda m: parts[m[1]], kept)


def page_of(body: str, parts: Mapping[str, str]) -> str:
    """A page that needs no other file; `body` is the template of what differs between pages. Each has the parts
    title and style, and may have data (JSON) and a script."""
    return filled(resource("page.html"), {"data": "null", "script": "", **parts, "body": filled(resource(body), parts)})
