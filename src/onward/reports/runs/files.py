"""The curves, figures and scores of a run or model as CSV, and its loss curve as PDF, for use in a paper."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onward.base.files import atomic_write
from onward.reports.pictures.numbers import csv_of, write_text
from onward.reports.pictures.pdf import ZOOM, pdf_of
from onward.reports.pictures.picture import colors, png_of
from onward.reports.pictures.plot import AXES, COLORS
from onward.reports.runs.record import Figures, RunRecord


def write_csv(folder: Path, out: Path, figures: Figures) -> list[Path]:
    """Write the tables of the run or model in `folder` that have rows as CSV to the folder `out`: curves.csv (a row for
    each step and validation), figures.csv and scores.csv. Return their paths."""
    record = RunRecord(folder)
    places = record.metrics.coordinates([row["step"] for row in record.metrics.rows])
    curves = [row | dict(zip(AXES, map(float, at))) for row, at in zip(record.metrics.rows, places.T)]
    tables: dict[str, Sequence[Mapping[str, Any]]] = {
        "curves.csv": curves,
        "figures.csv": [asdict(figures)],
        "scores.csv": [asdict(score) for score in record.scores],
    }
    written = {out / name: rows for name, rows in tables.items() if rows}
    for path, rows in written.items():
        write_text(path, csv_of(rows))
    return [*written]


def write_pdf(folder: Path, out: Path) -> list[Path]:
    """Write loss.svg of the run in `folder` as loss.pdf to the folder `out`. Return its path in a list, which is empty
    without a loss.svg."""
    if not (folder / "loss.svg").exists():
        return []
    svg = (folder / "loss.svg").read_text(encoding="utf-8").replace(COLORS, colors("light"))
    with atomic_write(out / "loss.pdf") as new:
        new.write_bytes(pdf_of(png_of(svg, ZOOM, "white")))
    return [out / "loss.pdf"]
