"""Output of commands: results on standard output, messages on standard error."""

import json
import sys
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onward.base.fields import decimal, import_options

console = Console(stderr=True, highlight=False)
given_imports: list[str] = []  # modules that this command was given by --import
MESSAGE = 1000  # number of characters to which longer messages are shortened
WIDEST = 1000  # width in columns of tables that are not printed on a terminal


class Output(Console):
    """Standard output. If its reader has exited, raises BrokenPipeError, as `print` does, not `rich`'s SystemExit."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print dicts with the same keys as a table. On a terminal long cells are wrapped; otherwise each row is one
    line."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0]:
        number = isinstance(rows[0][name], int | float)
        table.add_column(name.replace("_", " "), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(readable(value)) for value in row.values()))
    width = None if sys.stdout.isatty() else WIDEST
    Output(file=sys.stdout, highlight=False, width=width).print(table)


def printable(text: str) -> str:
    """Return a text in which characters that could control a terminal, all that are not printable except line breaks
    and tabs, are replaced by U+FFFD."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def shortened(message: str) -> str:
    """Shorten a message longer than 1,000 characters by removing its middle."""
    half = MESSAGE // 2
    return message if len(message) <= MESSAGE else f"{message[:half]} ... {message[-half:]}"


def readable(value: Any) -> str:
    """Format a value for a table: numbers with thousands separators, floats with four decimals."""
    if isinstance(value, float):
        return decimal(value, 4)
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_next(*commands: str) -> None:
    """Print the usual next `commands` under the heading "Next:", with the --import options of this command."""
    console.print("\nNext:", style="bold")
    for command in commands:
        known = command.split()
        more = import_options(module for module in given_imports if module not in known)
        console.print(f"  {command}{more if command.startswith('onward ') else ''}", markup=False, soft_wrap=True)


def with_text(command: str, text: str, options: str) -> str:
    """A command with a text and options. A text that begins with - comes last, after --, which ends the options."""
    if text.startswith("-"):
        return f"{command} {options}{import_options(given_imports)} -- {quote(text)}"
    return f"{command} {quote(text)} {options}"


def human(number: int) -> str:
    """Format a number with three significant digits and K, M, B or T: 7.24 B. Larger numbers are in T: 10,000 T."""
    digits, power = f"{number:.2e}".split("e")
    thousands = min(max(int(power) // 3, 0), 4)
    tens = int(power) - 3 * thousands
    return f"{float(digits) * 10.0**tens:,.{max(2 - tens, 0)}f} {' KMBT'[thousands]}"
