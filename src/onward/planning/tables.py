"""Reads runs from a table of parameters, tokens and losses, and numbers with units."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.base.errors import UserError
from onward.planning.fits import RunPoint

COLUMNS = {  # accepted column names of each quantity
    "parameters": ("parameters", "params", "n", "model size", "model_size"),
    "tokens": ("tokens", "d", "training tokens", "training_tokens"),
    "flops": ("flops", "c", "compute", "training flop", "training_flop", "flop"),
    "loss": ("loss", "l", "validation_loss", "val_loss"),
}


def read_table(path: Path) -> list[RunPoint]:
    """Read the runs in a table with the columns parameters, tokens (or flops, as 6 N D) and loss."""
    if path.suffix not in (".csv", ".tsv"):
        raise UserError(f"Cannot read runs from {path}: name a folder of runs, or a .csv or .tsv file")
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read {path} ({error}): name a .csv or .tsv file") from None
    rows = csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",")
    names = {name.strip().lower(): name for name in rows.fieldnames or ()}
    columns = {what: names[alias] for what, aliases in COLUMNS.items() for alias in reversed(aliases) if alias in names}
    for what, others in (("parameters", ""), ("tokens", "flops"), ("loss", "")):
        if not {what, others} & set(columns):
            raise UserError(
                f"{path} has no column {what} (it has {', '.join(names) or 'none'}): give the right column this name"
            )
    return [of_row(row, columns, f"{path}, line {rows.line_num}") for row in rows]


def of_row(row: Mapping[str | None, Any], columns: Mapping[str, str], where: str) -> RunPoint:
    """Return the run in a row; `columns` names the column of each quantity, `where` names the row in error messages."""
    if None in row:
        raise UserError(f"{where} has more cells than the table has columns: write numbers without commas")
    numbers = {}
    for what, column in columns.items():
        if not (row[column] or "").strip():
            raise UserError(f"{where} has no {column}: leave out runs without a result")
        try:
            numbers[what] = float(row[column])
        except ValueError:
            raise UserError(f"{where}: {column} is {row[column]!r:.40}, which is not a number") from None
        if not (math.isfinite(numbers[what]) and numbers[what] > 0):
            raise UserError(f"{where}: {column} is {row[column]}: leave out runs without a result")
    tokens = numbers["tokens"] if "tokens" in numbers else numbers["flops"] / 6 / numbers["parameters"]
    return RunPoint(numbers["parameters"], tokens, numbers["loss"])


UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}
BYTES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def amount(text: str, name: str) -> float:
    """Parse a number such as 1e9, 1.5B or 300M; `name` is its option."""
    return number_with(text, UNITS, f"{name} is {text!r}: write a positive number, such as 1e9, 1.5B or 300M")


def byte_count(text: str, name: str) -> float:
    """Parse a number of bytes, or of bytes per second, such as 24GiB, 80GB or 3.35TB/s."""
    plain = text.strip().lower().removesuffix("/s").removesuffix("b")
    return number_with(plain, BYTES, f"{name} is {text!r}: write a positive number of bytes, such as 24GiB or 80GB")


def operations(text: str, name: str) -> float:
    """Parse operations per second such as 989T, 989TFLOPS or 9.89e14."""
    plain = re.sub("flop(s|/s)?$", "", text.strip().lower())
    return number_with(plain, UNITS, f"{name} is {text!r}: write operations per second, such as 989T or 9.89e14")


def number_with(text: str, units: Mapping[str, float], message: str) -> float:
    """Parse a positive number that may have a unit; raises a UserError with `message` for any other text."""
    match = re.fullmatch(r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([a-z]*)", text.strip().lower())
    value = float(match[1]) * units.get(match[2], math.nan) if match else math.nan
    if not (math.isfinite(value) and value > 0):
        raise UserError(message)
    return value
