"""Runs a module in a separate process with a time limit, because user code may hang or crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def run_apart(
    module: str, arguments: Mapping[str, Any], seconds: float, output: int = subprocess.DEVNULL
) -> tuple[list[dict[str, Any]], int | None]:
    """Run `python -m MODULE ROWS ARGUMENTS` in a process with a time limit of `seconds`, and then kill the processes
    that the module started. ROWS is a file to which the module writes a line of JSON per row, and ARGUMENTS are the
    `arguments` as JSON. The module's printed output goes to the file descriptor `output`; by default, it is discarded.
    Returns (rows, exit status); the status is None if the process took longer."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.touch()
        command = [sys.executable, "-m", module, str(rows), json.dumps(arguments)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()], status
