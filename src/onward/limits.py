"""The limit of memory of a process that does what is not trusted."""

import resource
from pathlib import Path

STATM = Path("/proc/self/statm")


def limit_memory(more: int) -> None:
    """Let this process allocate this many bytes more, and then have a MemoryError; no limit where Linux is not."""
    if STATM.exists():
        most = int(STATM.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
