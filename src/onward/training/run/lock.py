"""The lock of a run folder, so that only one process at a time works in the folder. The operating system releases the
lock when the process ends, even if it is killed.

RUN/train.lock is locked with flock, which also works over NFS. The file names the last process that held the lock.
"""

import fcntl
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
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
    job with other options counts as another job; "" without a job."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if job == "none" else f"{job}, command {crc32(json.dumps(sys.argv[1:]).encode()):08x}"


def of_this_job(folder: Path) -> bool:
    """Return whether the last process that held the lock of a run folder was in the same job as this process."""
    try:
        return bool(this_job()) and (folder / LOCK).read_text().endswith(f" in job {this_job()}")
    except (OSError, ValueError):
        return False


class Hold:
    """The lock of a run folder, held by this process as long as this object exists. `busy` says whether a `run_lock` is
    open; `earlier` is the name of the process that held the lock before. Raises a UserError if another process holds
    the lock."""

    def __init__(self, folder: Path) -> None:
        self.path, self.busy = folder / LOCK, False
        try:
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}; choose another --out") from None
        weakref.finalize(self, os.close, self.file)
        try:
            lock_exclusively(self.file)
        except BlockingIOError:
            raise in_use(folder) from None
        except OSError:  # the file system does not support locks
            pass
        if not self.valid():
            raise in_use(folder)  # another process failed to start and removed the folder; it may exist again
        self.earlier = os.pread(self.file, 1 << 16, 0).decode(errors="replace")

    def valid(self) -> bool:
        """Return whether the file at the path is still the locked file."""
        return self.path.exists() and os.path.samestat(os.fstat(self.file), self.path.stat())

    def write(self, name: str) -> None:
        with suppress(OSError):  # a full disk
            os.truncate(self.file, 0)
            os.pwrite(self.file, name.encode(), 0)


KEEPING = ContextVar("KEEPING", default=False)
HELD: weakref.WeakValueDictionary[Path, Hold] = weakref.WeakValueDictionary()  # locks held by this process, by folder


@contextmanager
def keeping() -> Iterator[None]:
    """Context manager for commands: a run that is started or resumed inside it keeps the lock of its folder until its
    training ends. Outside it, a program may start a run and leave the training to another process."""
    token = KEEPING.set(True)
    try:
        yield
    finally:
        KEEPING.reset(token)


@contextmanager
def run_lock(folder: Path, *, again: bool = False) -> Iterator[Hold]:
    """Context manager: inside it, no other process or `run_lock` works in the existing run folder `folder`, because
    this process holds its lock and no other `run_lock` of the folder is open. If the caller keeps the Hold after the
    context ends, other processes remain locked out.

    Raises a UserError if another process holds the lock or, with `again`, if another process has worked in the folder
    since this process last held the lock. If the context ends with a UserError, without `again`, the lock file names
    the earlier process again.
    """
    kept = HELD.get(folder.resolve())
    if kept and not kept.valid():  # the folder has been removed
        kept = None
    if kept and kept.busy:
        raise in_use(folder)
    hold = kept or Hold(folder)
    if again and not kept and hold.earlier not in ("", this_process()):
        raise UserError(f"{hold.earlier}, has trained in {folder} since this process read it: resume the run again")
    HELD[folder.resolve()] = hold
    hold.write(this_process())
    hold.busy = True
    try:
        yield hold
    except UserError:
        if not again:
            hold.write(hold.earlier)
        raise
    finally:
        hold.busy = False


def lock_exclusively(file: int) -> None:
    """Lock an open file; raises BlockingIOError if another process has locked it exclusively. A shared lock comes from
    `is_running` and lasts for microseconds; this function waits until it is released."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises BlockingIOError unless all locks are shared
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.001)


def is_running(folder: Path) -> bool:
    """Return whether a process is training in a run folder now, or is about to."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run, or no support for locks
        return False
    return False


def in_use(folder: Path) -> UserError:
    """Return the error for a process that finds the run folder `folder` locked. The message has the name of the process
    that holds the lock, if the lock file contains one."""
    try:
        holder = (folder / LOCK).read_text()
    except (OSError, ValueError):
        holder = ""
    description = f" ({holder})" if holder else ""
    return UserError(
        f"another process trains in {folder}{description}: wait until it ends or stop it, or choose another --out"
    )
