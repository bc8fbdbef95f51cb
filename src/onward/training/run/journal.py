"""Files of JSON lines, of which a full disk or a killed process damages at most the last line."""

import json
import os
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from onward.base.errors import UserError


class Journal:
    """Appends lines to a file of JSON lines. While the disk is full, lines are kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, ""

    def write(self, row: dict[str, Any]) -> None:
        """Append a row as a line, after the lines that are still in memory."""
        self.waiting += json.dumps(row) + "\n"
        data = self.waiting.encode()
        try:
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    complete = file.write(data) == len(data)
                except OSError:
                    complete = False
                if complete:
                    self.waiting = ""
                else:
                    file.truncate(end)
        except OSError:  # for example, because the folder was removed
            pass

    def cut(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Delete all rows from the first row for which `keep` is false, and an incomplete last line left by a killed
        process."""
        self.waiting = "".join(takewhile(lambda line: keep(json.loads(line)), self.waiting.splitlines(keepends=True)))
        if self.path.exists():
            lines = enumerate(self.path.read_bytes().splitlines(keepends=True), 1)
            kept = takewhile(lambda line: line[1].endswith(b"\n") and keep(self.row(*line)), lines)
            os.truncate(self.path, sum(len(line) for _, line in kept))  # also works on a full disk

    def row(self, number: int, line: bytes) -> dict[str, Any]:
        """Parse a line of the file as a row; `number` is the line number, for errors. Raises a UserError if the line is
        not a JSON object with a step."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.path} line {number} is not JSON ({error}): correct or remove the line") from None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise UserError(f"{self.path} line {number} has no integer step: correct or remove the line")
        return row
