"""Lines of JSON that outlive a full disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onward.files import written_whole


class Journal:
    """A file of JSON lines. Where the disk is full, lines wait in memory until there is room again."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, ""

    def write(self, row: dict[str, Any]) -> None:
        """Append a line, or have it wait."""
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
        except OSError:  # the folder is gone, say
            pass

    def cut(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Keep only the rows that `keep` says, and no line that a kill left unfinished."""
        if self.path.exists():
            lines = [line for line in self.path.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]
            with written_whole(self.path) as new:
                new.write_text("".join(line for line in lines if keep(json.loads(line))), encoding="utf-8")
