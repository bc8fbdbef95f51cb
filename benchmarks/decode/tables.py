"""Timing in turns, and tables of the results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

from onward.reports import Picture

K = TypeVar("K")
T = TypeVar("T")
Cell = str | int | float | None


def in_turns(cases: Mapping[K, Callable[[], T]], rounds: int, warm: int = 1) -> dict[K, list[T]]:
    """The results of `rounds` calls of each case, after `warm` calls to warm up. The cases take turns, so that other
    work on the machine slows all of them about equally."""
    results: dict[K, list[T]] = {name: [] for name in cases}
    for turn in range(warm + rounds):
        for name, run in cases.items():
            result = run()
            if turn >= warm:
                results[name].append(result)
    return results


def summary(speeds: Mapping[str, Sequence[float]], name: str) -> list[Cell]:
    """Three cells: the median speed, the best, and the ratio of Onward's median to this median (None for Onward)."""
    ours = median(speeds["onward"]) / median(speeds[name]) if name != "onward" else None
    return [median(speeds[name]), max(speeds[name]), ours]


@dataclass
class Table:
    """A table of results, which prints as Markdown."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    picture: Picture | None = None

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "columns": self.columns, "rows": self.rows, "notes": self.notes}

    def as_text(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *([shown(cell) for cell in row] for row in self.rows)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines) if self.rows else ""
        return "\n\n".join(filter(None, [f"## {self.title}", table, "\n".join(self.notes)]))


def shown(cell: Cell) -> str:
    """A cell as text: floats with three significant digits, from 100 on as whole numbers."""
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell
