"""Memory of this machine: its size, limits for untrusted processes, and reuse of freed memory."""

import ctypes
import os
import resource
import sys
from pathlib import Path

STATM = Path("/proc/self/statm")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # options of mallopt (malloc.h)
KEPT = (1 << 31) - 1  # bytes
CONTAINER = Path("/sys/fs/cgroup/memory.max")  # of a container; "max": no limit


def limit_memory(more: int) -> None:
    """Limit the memory that this process can still allocate to `more` bytes, after which a MemoryError is raised;
    without effect outside of Linux. Used in processes that run untrusted code or read untrusted files."""
    if STATM.exists():
        most = int(STATM.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def memory_size() -> int:
    """Return the size of the machine's memory, or of the container's limit, in bytes; 0 if unknown."""
    names = os.sysconf_names if hasattr(os, "sysconf") else {}
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in names else 0
    try:
        limit = CONTAINER.read_text().strip()
    except OSError:
        limit = "max"
    return min(total or int(limit), int(limit)) if limit.isdecimal() else total


def keep_freed_memory() -> None:
    """Let this process keep up to 2 GiB of freed memory for its next allocations, if the C library is glibc.

    Each training step frees the memory of its activations. If it returned to the system, the next step would get it
    back page by page, and a page fault costs more than computing the numbers of the page.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for option in TRIM_THRESHOLD, MMAP_THRESHOLD:
            mallopt(option, KEPT)


def in_bytes(size: int) -> str:
    """Format a number of bytes in MB or GB: 2.2 GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
