"""Converts texts from the source code, such as docstrings and field comments, to Markdown and HTML."""

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass

CODE = re.compile(r"(`[^`\n]*`)")
FLAG = re.compile(r"(?<![\w`-])(--[a-z][\w.-]*\w)")


@dataclass(frozen=True)
class Definition:
    """An option or a field: its anchor on the page, its spelling, its meaning, and notes such as its default."""

    anchor: str
    term: str
    meaning: str
    notes: tuple[str, ...] = ()  # may contain code in backticks, like `meaning`


def escaped(text: str) -> str:
    """Return text with HTML and the characters *, _, [ and ] escaped, except in code in backticks."""
    parts = CODE.split(text)
    plain = lambda part: re.sub(r"([*_\[\]])", r"\\\1", html.escape(part, quote=False))
    return "".join(part if i % 2 else plain(part) for i, part in enumerate(parts))


def prose(text: str) -> str:
    """Return text as Markdown, with options such as --seed as code."""
    parts = CODE.split(text)
    return escaped("".join(part if i % 2 else FLAG.sub(r"`\1`", part) for i, part in enumerate(parts)))


def inline(text: str) -> str:
    """Return text as HTML, with code in backticks and options such as --seed as code."""
    parts = CODE.split(text)
    marked = CODE.split("".join(part if i % 2 else FLAG.sub(r"`\1`", part) for i, part in enumerate(parts)))
    return "".join(code(part[1:-1]) if i % 2 else html.escape(part, quote=False) for i, part in enumerate(marked))


def code(text: str) -> str:
    """Return code as HTML, in which a line may break after each |."""
    return f"<code>{html.escape(text, quote=False).replace('|', '|<wbr>')}</code>"


def definitions(rows: Iterable[Definition]) -> str:
    """Return a list of definitions as HTML. Each has an anchor, to which its term links."""
    lines = ['<dl class="definitions">']
    for row in rows:
        name = html.escape(row.anchor)
        notes = "".join(f" <small>{inline(note)}</small>" for note in row.notes)
        lines.append(f'<div id="{name}"><dt><a href="#{name}">{code(row.term)}</a>{notes}</dt>')
        lines.append(f"<dd>{inline(row.meaning)}</dd></div>")
    return "\n".join([*lines, "</dl>\n"])


def slug(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-")
