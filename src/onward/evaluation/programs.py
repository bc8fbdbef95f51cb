"""Test programs that a model wrote, each in a separate process."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SANDBOX = Path(__file__).with_name("sandbox.py")
RESULTS = 1 << 20  # maximum number of bytes of results that are read
GIGABYTE = 1 << 30
FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def code_of(text: str) -> str:
    """The last fenced code block; the whole text if there is none."""
    blocks = FENCED.findall(text)
    return blocks[-1] if blocks else text


def num_passed(code: str, tests: Sequence[str], seconds: float, gigabytes: float) -> int:
    """Run the program `code` and then each test in a restricted process (sandbox.py); return how many tests pass. A
    test is code that raises an exception if it fails."""
    secret = secrets.token_hex(16)
    job = {"code": code, "tests": tests, "secret": secret, "seconds": seconds, "memory": int(gigabytes * GIGABYTE)}
    with (
        tempfile.TemporaryDirectory(prefix="onward-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as results,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", str(SANDBOX)],
            stdin=subprocess.PIPE,
            stdout=results,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(job).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        results.seek(0)
        lines = {*results.read(RESULTS).splitlines()}
    return sum(f"{secret} {number}".encode() in lines for number in range(len(tests)))
