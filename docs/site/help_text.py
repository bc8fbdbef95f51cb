"""The text of a command's `--help` as Markdown: paragraphs, a code block for each example, and lists."""

import re

from docs.site.markup import Definition, definitions, prose

TITLE = re.compile(r"[a-z][a-z ]*:")
GAP = re.compile(r" {2,}")
WIDTH = 74  # characters in a line of code on the site, to the left of the copy button


def help_page(text: str) -> str:
    """Return the text of a command's help as Markdown."""
    return "\n\n".join(block(part.split("\n")) for part in text.strip("\n").split("\n\n"))


def block(lines: list[str]) -> str:
    """Return a block of lines as Markdown: a title or a paragraph, followed by indented lines."""
    first = next((i for i, line in enumerate(lines) if line.startswith("  ")), len(lines))
    above, below = " ".join(lines[:first]), lines[first:]
    is_title = TITLE.fullmatch(above)
    head = f"## {above[0].upper()}{above[1:-1]}" if is_title else prose(above)
    if not below:
        return head
    rows = [tuple(GAP.split(row, maxsplit=1)) for row in joined(below)]
    named = all(len(row) == 2 for row in rows) and not above.startswith("examples")
    listed = definitions(Definition(row[0], row[0], row[1]) for row in rows) if named else examples(rows)
    return f"{head}\n\n{listed}"


def joined(lines: list[str]) -> list[str]:
    """Return the rows of indented lines. A line that is indented further, or not at all, continues the previous row."""
    rows: list[str] = []
    for line in lines:
        if re.match(r"  \S", line):
            rows.append(line.strip())
        else:
            rows[-1] += f" {line.strip()}" if line.startswith(" ") else f"\n{line}"
    return rows


def examples(rows: list[tuple[str, ...]]) -> str:
    """Return a code block for each (code, note), with the note above it."""
    lines = ['<div class="examples" markdown="1">\n']
    for code, *note in rows:
        language = "json" if code.startswith("{") else "sh"
        lines += [f"{prose(text[0].upper() + text[1:])}:\n" for text in note]
        lines.append(f"```{language}\n{wrapped(code) if language == 'sh' else code}\n```\n")
    return "\n".join([*lines, "</div>"])


def wrapped(command: str) -> str:
    """Return a command with a line break before each option or pipe that does not fit on the line."""
    lines = [""]
    for part in re.split(r" (?=--[a-z]|\| )", command):
        if lines[-1] and len(lines[-1]) + len(part) > WIDTH:
            lines.append(f"    {part}")
        else:
            lines[-1] = f"{lines[-1]} {part}".lstrip() if len(lines) == 1 else f"{lines[-1]} {part}"
    return " \\\n".join(lines)
