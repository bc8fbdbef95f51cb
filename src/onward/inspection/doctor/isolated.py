"""The doctor in a process of its own, with limits of time and memory, since a model's code may do anything.

python -m onward.inspection.doctor.isolated RESULTS GIGABYTES ARGUMENTS
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onward.errors import UserError
from onward.limits import limit_memory

GIGABYTE = 1 << 30


def examine_apart(arguments: Mapping[str, Any], seconds: float, gigabytes: float) -> list[dict[str, Any]]:
    """The findings, as tables, on the subject with these arguments of `target.subject_of`.

    A UserError if the process takes longer, ends, or cannot make the subject. What the model prints is dropped.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        results.touch()
        command = [sys.executable, "-m", __name__, str(results), str(gigabytes), json.dumps(arguments)]
        try:
            nothing = subprocess.DEVNULL
            done = subprocess.run(command, timeout=seconds, check=False, stdin=nothing, stdout=nothing, stderr=nothing)
            status: int | None = done.returncode
        except subprocess.TimeoutExpired:
            status = None
        rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    if rows and "error" in rows[-1]:
        raise UserError(rows[-1]["error"])
    if status == 0:
        return rows
    after = f"after the check '{rows[-1]['check']}'" if rows else "before the first check"
    if status is None:
        raise UserError(f"the model took longer than {seconds:g} s, {after}: choose a smaller one, or --seconds")
    raise UserError(f"the process of the model ended with status {status}, {after}: try more --gigabytes")


def main(results: str, gigabytes: str, arguments: str) -> None:
    """The work of the process: one line of JSON for each finding, or one with the error."""
    from onward.inspection.doctor.checks import examine
    from onward.inspection.doctor.target import subject_of

    with open(results, "a", encoding="utf-8", buffering=1) as file:
        try:
            limit_memory(int(float(gigabytes) * GIGABYTE))
            for finding in examine(subject_of(**json.loads(arguments))):
                print(json.dumps(asdict(finding)), file=file)
        except (UserError, MemoryError) as error:
            print(json.dumps({"error": str(error) or f"the model takes more than {gigabytes} GB"}), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
