"""Runs from a table of parameters, tokens and losses, and numbers with units."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.errors import UserError
from onward.planning.fits import Run

COLUMNS = {  # names of a column in tables of others
    "parameters": ("parameters", "params", "n", "model size", "model_size"),
    "tokens": ("tokens", "d", "training tokens", "training_tokens"),
    "flops": ("flops", "c", "compute", "training flop", "training_flop", "flop"),
    "loss": ("loss", "l", "validation_loss", "val_loss"),
}


def read_table(path: Path) -> list[Run]:
    """The runs in a table (.csv or .tsv) with the columns parameters, tokens (or flops, from which 6 N D follows) and
    loss. Raises a UserError that names the line."""
    if path.suffix not in (".csv", ".tsv"):
        raise UserError(f"{path} is neither a folder of runs nor a .csv or .tsv: name one of them")
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): name a table") from None
    rows = csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",")
    names = {name.strip().lower(): name for name in rows.fieldnames or ()}
    found = {what: names[alias] for what, aliases in COLUMNS.items() for alias in reversed(aliases) if alias in names}
    for what, others in (("parameters", ""), ("tokens", "flops"), ("loss", "")):
        if not {what, others} & set(found):
            raise UserError(f"{path} has no column {what} (it has {', '.join(names) or 'none'}): name one so")
    return [of_row(row, found, f"{path}, line {line}") for line, row in enumerate(rows, 2)]


def of_row(row: Mapping[str, Any], columns: Mapping[str, str], where: str) -> Run:
    numbers = {}
    for what, column in columns.items():
        try:
            numbers[what] = float(row[column])
        except (TypeError, ValueError):
            raise UserError(f"{where}: {column} is {row[column]!r:.40}, which is no number") from None
        if not (math.isfinite(numbers[what]) and numbers[what] > 0):
            raise UserError(f"{where}: {column} is {row[column]}: leave out runs without a result")
    tokens = numbers["tokens"] if "tokens" in numbers else numbers["flops"] / 6 / numbers["parameters"]
    return Run(numbers["parameters"], tokens, numbers["loss"])


UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def amount(text: str, name: str) -> float:
    """A number such as 1e9, 1.5B or 300M. Raises a UserError that names the option."""
    number, unit = text.strip(), ""
    if number[-1:].lower() in UNITS and number:
        number, unit = number[:-1], number[-1:].lower()
    try:
        value = float(number) * UNITS[unit]
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} is {text!r}: write a positive number, such as 1e9, 1.5B or 300M")
    return value
