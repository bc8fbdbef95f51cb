"""The lock of a run folder: at most one process trains in it. The system releases it however that process ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onward.errors import UserError

LOCK = "train.lock"


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder. A UserError where another process holds it."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(folder) from None
        yield


def is_running(folder: Path) -> bool:
    """Whether a process of this machine trains in a run folder at this moment."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run, or a file system without locks
        return False
    return False


def in_use(folder: Path) -> UserError:
    """The error for a second process in a run folder."""
    return UserError(f"another process trains in {folder}: wait until it ends or stop it, or choose another --out")
