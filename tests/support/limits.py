"""Bounds on the time and memory of code that a test runs."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limited(seconds: float, room: int) -> Iterator[None]:
    """Context manager: more than `room` bytes beyond the current address space, or more than `seconds` of CPU time,
    raise an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (here + room, hard))
    start = time.process_time()  # CPU time, independent of other processes
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - start < seconds
