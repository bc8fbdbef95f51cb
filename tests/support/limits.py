"""Bounds on the time and the memory of what a test runs."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limited(seconds: float, room: int) -> Iterator[None]:
    """Allocations of more than `room` bytes beyond those of now fail; taking longer than `seconds` is an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (here + room, hard))
    start = time.monotonic()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.monotonic() - start < seconds
