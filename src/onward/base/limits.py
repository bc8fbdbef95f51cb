"""Memory of this machine: its size, limits for untrusted processes, and reuse of freed memory."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STATM = Path("/proc/self/statm")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # options of mallopt (malloc.h)
KEPT = (1 << 31) - 1  # bytes of freed memory that the process keeps
PROCESS = Path("/proc/self")  # Linux's files about this process: its control groups and their mount points
GROUP_FILES = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}  # by version
UNLIMITED = 1 << 60  # bytes; version 1 of control groups writes "no limit" as a huge number


def limit_memory(more: int) -> None:
    """Limit the memory that this process can still allocate to `more` bytes, after which a MemoryError is raised;
    without effect outside of Linux. Used in processes that run untrusted code or read untrusted files."""
    if STATM.exists():
        most = int(STATM.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def memory_size() -> int:
    """Return the memory in bytes that this process may use: that of the machine or, if it is less, the limit of its
    control groups (of a container, a systemd unit, a batch job) or of its address space (`ulimit -v`); 0 if unknown."""
    names = os.sysconf_names if hasattr(os, "sysconf") else {}
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in names else 0
    sizes = [total, *group_limits(), address_limit()]
    return min((size for size in sizes if 0 < size < UNLIMITED), default=0)


def group_limits() -> Iterator[int]:
    """The limits in bytes of the control groups of this process, from its own up to the root of each hierarchy; nothing
    except on Linux."""
    try:
        groups = [line.split(":", 2) for line in (PROCESS / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (PROCESS / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    own = {"cgroup2" if not names else "cgroup": path for _, names, path in groups if not names or "memory" in names}
    for mount in mounts:
        root, point, kind = mount[3], Path(unescaped(mount[4])), mount[mount.index("-") + 1]
        if kind not in own or (kind == "cgroup" and "memory" not in mount[-1].split(",")):
            continue
        inner = Path(own[kind])  # the root of the mount is a group as well
        folder = point / inner.relative_to(root) if inner.is_relative_to(root) else point
        while folder.is_relative_to(point):
            for name in GROUP_FILES[kind]:
                with suppress(OSError, ValueError):  # the root group has no such file; "max" means no limit
                    yield int((folder / name).read_text())
            folder = folder.parent


def unescaped(path: str) -> str:
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def address_limit() -> int:
    """Return the address-space limit in bytes, minus the address space that this process has mapped but does not use,
    such as that of libraries; 0 if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return 0
    mapped, used = map(int, STATM.read_text().split()[:2]) if STATM.exists() else (0, 0)
    return max(1, limit - (mapped - used) * resource.getpagesize())


def resident_memory() -> int:
    """Return the bytes of memory that this process uses now; 0 if unknown."""
    return int(STATM.read_text().split()[1]) * resource.getpagesize() if STATM.exists() else 0


def keep_freed_memory() -> None:
    """Let this process keep up to 2 GiB of freed memory for its next allocations, if the C library is glibc.

    Each training step frees the memory of its activations. If this memory were returned to the system, the next step
    would get it back page by page, and a page fault costs more than computing the numbers of the page.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for option in TRIM_THRESHOLD, MMAP_THRESHOLD:
            mallopt(option, KEPT)


def in_bytes(size: int) -> str:
    """Format a number of bytes in MB or GB: 2.2 GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
