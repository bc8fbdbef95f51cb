"""Files of JSON lines that are complete even after the disk was full."""

import json
import os
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any


class Journal:
    """A file of JSON lines. While the disk is full, lines are kept in memory."""

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
                    whole = file.write(data) == len(data)
                except OSError:
                    whole = False
                if whole:
                    self.waiting = ""
                else:
                    file.truncate(end)
        except OSError:  # for example, the folder was removed
            pass

    def cut(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Keep the rows before the first for which `keep` is false; remove a line that a kill left unfinished."""
        self.waiting = "".join(takewhile(lambda line: keep(json.loads(line)), self.waiting.splitlines(keepends=True)))
        if self.path.exists():
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = takewhile(lambda line: line.endswith(b"\n") and keep(json.loads(line)), lines)
            os.truncate(self.path, sum(map(len, kept)))  # works on a full disk
