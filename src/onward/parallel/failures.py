"""One report for a failure of several processes: the first one to fail gives the reason, the others name its rank."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError

from onward.base.errors import UserError
from onward.parallel.heartbeats import heartbeats
from onward.parallel.launch import Launch


class Terminated(BaseException):
    """Raised on SIGTERM, the signal that torchrun sends to the remaining processes after one has ended. `except
    Exception` does not catch it."""


@contextmanager
def one_report(patience: float = 5.0, remedy: str = "go on with --resume") -> Iterator[None]:
    """A context manager for the work of one of several processes: connects to the other processes that torchrun
    started, and reports a failure once. The first process that fails raises its own error (with its rank, if it is a
    UserError); the others raise a UserError that names this rank.

    A lost connection is usually caused by another process that failed: a process that loses its connection waits up to
    `patience` seconds for that process to report its error. If no process does, or if one was killed, the first process
    that notices raises a UserError with the `remedy`. If a process is silent without having ended, the others end (see
    heartbeats.py). The message is also written to the file TORCHELASTIC_ERROR_FILE, from which torchrun reads it.
    """
    launch = Launch.meet()
    if launch.store is None:
        yield
        return
    store, rank = launch.store, launch.rank
    store.set(f"process/{rank}", f"{os.getpid()} {socket.gethostname()}")
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with heartbeats(launch, remedy, write_error_file):
            yield
    except (Exception, Terminated) as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # let this process end with its own message
        try:
            failed, reporter = first_failure(launch, error, patience)
        except RuntimeError:  # rank 0, which hosts the store if torchrun does not, has ended
            failed, reporter = 0, 0
        if failed == rank and isinstance(error, Terminated):
            raise SystemExit(128 + signal.SIGTERM) from None
        if failed == reporter == rank:
            report = in_one_sentence(error, rank, remedy)
        elif reporter == rank:
            report = UserError(
                f"rank {failed} was killed, perhaps for lack of memory: {remedy}, if need be with smaller batches or "
                "fewer processes"
            )
        else:
            report = UserError(f"rank {rank} ended because rank {failed} ended")
        write_error_file(str(report) or type(report).__name__, first=reporter == rank)
        if report is error:
            raise
        raise report from None
    else:
        signal.signal(signal.SIGTERM, before)


def terminate(*_: object) -> NoReturn:
    raise Terminated


def in_one_sentence(error: BaseException, rank: int, remedy: str) -> BaseException:
    """Return `error` as a UserError that names `rank`, the rank of this process, if it is a UserError or an error of
    the connection between processes; the latter also names the `remedy`. Any other error is returned unchanged."""
    if isinstance(error, UserError):
        return UserError(f"rank {rank}: {error}")
    if isinstance(error, DistError) or "gloo" in str(error):
        reason = str(error).splitlines()[0]
        return UserError(f"rank {rank} has lost the connection to another rank ({reason}): {remedy}")
    return error


def first_failure(launch: Launch, error: BaseException, patience: float) -> tuple[int, int]:
    """Return the rank of the process that failed first, and the rank of the process that reports this. `error` is the
    error of this process. If it may come from a lost connection, waits up to `patience` seconds for another process to
    report the cause."""
    store: Any = launch.store
    failed, until = launch.rank, time.monotonic() + patience
    if isinstance(error, Terminated | RuntimeError):  # another process may have closed the connection
        while not store.check(["failure"]) and time.monotonic() < until:
            if killed := [rank for rank in range(launch.count) if is_dead(store.get(f"process/{rank}").decode())]:
                failed = killed[0]
                break
            time.sleep(0.05)
    known = store.compare_set("failure", "", f"{failed} {launch.rank}").decode()
    failed, reporter = map(int, known.split())
    return failed, reporter


def is_dead(process: str) -> bool:
    """Return whether a process, given as the text "ID HOST", has ended; False if it ran on another host."""
    pid, host = process.split()
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(pid), 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except OSError:  # a system without /proc
        return False


def write_error_file(sentence: str, first: bool) -> None:
    """Write `sentence`, the reason why this process ended, to the file that torchrun reads. If several processes write
    a reason, torchrun shows the earliest; `first` says whether this process reports the first failure."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": sentence, "timestamp": str(int(time.time()) + (not first))}
        Path(path).write_text(json.dumps({"message": {"message": sentence, "extraInfo": extra}}))
