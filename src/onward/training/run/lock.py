"""The lock of a run folder, so that only one process at a time works in the folder. The operating system releases the
lock when the process ends, even if it is killed.

RUN/train.lock is locked with flock, which also works over NFS. The file names the last process that held the lock.
"""

import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from zlib import crc32

from onward.base.errors import UserError

LOCK = "train.lock"
STARTED = datetime.now().isoformat(" ", "seconds")


def this_process() -> str:
    """Describe this process in words: process id, host, start time and, if torchrun was given one, the job."""
    named = f" in job {job}" if (job := this_job()) else ""
    return f"process {os.getpid()} on {socket.gethostname()}, started {STARTED}{named}"


def this_job() -> str:
    """Return the name of the job that torchrun was given (--rdzv-id) with a checksum of the command, so that the same
    job with other options is another; "" without a job."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if job == "none" else f"{job}, command {crc32(json.dumps(sys.argv[1:]).encode()):08x}"


def of_this_job(folder: Path) -> bool:
    """Return whether the last process that held the lock of a run folder was in the same job as this process."""
    try:
        return bool(this_job()) and (folder / LOCK).read_text().endswith(f" in job {this_job()}")
    except (OSError, ValueError):
        return False


@contextmanager
def run_lock(folder: Path, *, again: bool = False) -> Iterator[None]:
    """A context that holds the lock of the existing run folder `folder`. Raises a UserError if another process holds
    the lock or, with `again`, if another process has trained in the folder since this process last held the lock."""
    path = folder / LOCK
    try:
        file = path.open("r+" if path.exists() else "a+", errors="replace")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; choose another --out") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(folder) from None
        except OSError:  # a file system without locks
            pass
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise in_use(folder)  # another process failed to start and removed the folder; it may exist again
        if again and (last := file.read()) not in ("", this_process()):
            raise UserError(f"{last}, has trained in {folder} since this process read it: resume the run again")
        with suppress(OSError):  # a full disk
            file.truncate(0)
            os.pwrite(file.fileno(), this_process().encode(), 0)
        yield


def is_running(folder: Path) -> bool:
    """Return whether a process is training in a run folder now."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run, or a file system without locks
        return False
    return False


def in_use(folder: Path) -> UserError:
    """Return the error for a process that finds the run folder `folder` locked. The message names the process that
    holds the lock."""
    try:
        holder = (folder / LOCK).read_text()
    except (OSError, ValueError):
        holder = ""
    description = f" ({holder})" if holder else ""
    return UserError(
        f"another process trains in {folder}{description}: wait until it ends or stop it, or choose another --out"
    )
