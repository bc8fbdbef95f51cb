"""The numbers of pictures and tables as files: CSV, Markdown, LaTeX."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.base.files import atomic_write

SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as new:
        new.write_text(text, encoding="utf-8", newline="")


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with a column for each name that any row has, in the order of their first appearance."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*dict.fromkeys(name for row in rows for name in row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows with the same names as a table in Markdown."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def latex_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows with the same names as a table in LaTeX, with the rules of the package booktabs; columns of numbers
    are flush right."""
    numeric = [all(re.fullmatch(r"[-+.,\d]*", row[name]) for row in rows) for name in rows[0]]
    line = lambda cells: f"{' & '.join(map(escaped, cells))} \\\\\n"
    body = "".join(line(row.values()) for row in rows)
    columns = "".join("r" if number else "l" for number in numeric)
    head = f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{line(rows[0])}\\midrule\n"
    return f"% needs \\usepackage{{booktabs}}\n{head}{body}\\bottomrule\n\\end{{tabular}}\n"


def escaped(text: str) -> str:
    """Escape the special characters of a text for LaTeX."""
    return re.sub(r"[\\~^&%$#_{}]", lambda match: SPECIAL.get(match[0], "\\" + match[0]), text)


def write_tables(stem: Path, rows: Sequence[Mapping[str, str]], numbers: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write a table as Markdown and LaTeX, and its exact `numbers` as CSV, to files named `stem` with three endings;
    return their paths."""
    texts = {".md": markdown_of(rows), ".tex": latex_of(rows), ".csv": csv_of(numbers)}
    for ending, text in texts.items():
        write_text(stem.with_suffix(ending), text)
    return [stem.with_suffix(ending) for ending in texts]


def values_of(panel: str, data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of a panel: that of a curve with the curve's name and x, that of a cell with its row
    and column, any other with its name."""

    def many(rows: Sequence[Any], columns: Sequence[Any], values: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
        for row, line in zip(rows, values):
            yield from ({"panel": panel, "row": row, "column": c, "value": v} for c, v in zip(columns, line))

    match data:
        case {"series": series, "x": x}:
            yield from many([*series], x, [*series.values()])
            dots = data.get("dots", [])
            yield from ({"panel": panel, "row": "dots", "column": a, "value": b} for a, b in dots)
        case {"rows": rows, "columns": columns, "values": values}:
            yield from many(rows, columns, values)
        case {"bars": bars}:
            yield from many([*bars], [""], [[value] for value in bars.values()])
        case {"words": words, "values": [values]}:
            yield from many(words, [""], [[value] for value in values])
        case _:
            for name, values in data.items():
                listed = values if isinstance(values, list) else [values]
                yield from many([name] * len(listed), [""], [[value] for value in listed])
