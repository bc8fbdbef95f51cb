"""Heartbeats, which detect a process that no longer answers because it is stopped or its machine is cut off. A timeout
of collectives cannot detect this, since a collective may wait for hours, for example while the first process prepares
the data alone."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, NoReturn

from onward.base.errors import UserError
from onward.parallel.launch import Launch

PATIENCE = 600.0  # default number of seconds without a heartbeat after which a process counts as lost
ENDED = 1 << 40  # added to the heartbeats of a process that has ended


def patience() -> float:
    """Return the number of seconds to wait for a silent process: the environment variable ONWARD_PATIENCE, by default
    600. Raises a UserError for a value that is not a positive number."""
    text = os.environ.get("ONWARD_PATIENCE", str(PATIENCE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"ONWARD_PATIENCE is {text!r}: give a number of seconds, such as 600")
    return seconds


@contextmanager
def heartbeats(launch: Launch, remedy: str, report: Callable[[str, bool], None]) -> Iterator[None]:
    """A context manager under which a thread counts the heartbeats of this process in the store of all processes. The
    first process watches all others, and each of the others watches the first.

    If a process is silent for `patience()` seconds, all others end with status 2, since their collectives cannot be
    interrupted. One of them prints the rank of the silent process and the `remedy`. Before a process ends, it calls
    `report` with its message, and with whether it is the process that prints the reason.
    """
    seconds, stopped = patience(), Event()
    thread = Thread(target=watch, args=(launch, seconds, stopped, remedy, report), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(seconds)


def watch(launch: Launch, seconds: float, stopped: Event, remedy: str, report: Callable[[str, bool], None]) -> None:
    """Send heartbeats and watch other processes until `stopped` is set; the other arguments are those of
    `heartbeats`."""
    shared: Any = launch.store
    rank, store, interval = launch.rank, shared.clone(), min(5.0, seconds / 10)  # each thread needs its own client
    watched = [0] if rank else range(1, launch.count)
    heard, silent = dict.fromkeys(watched, -1), dict.fromkeys(watched, 0.0)
    try:
        while not stopped.wait(interval):
            store.add(f"heartbeats/{rank}", 1)
            for other in watched:
                beats, before = store.add(f"heartbeats/{other}", 0), heard[other]
                # sum intervals instead of reading a clock: this process may have been stopped as well
                silent[other] = silent[other] + interval if beats == before and beats < ENDED else 0.0
                heard[other] = beats
            lost = next((other for other in watched if silent[other] >= seconds), None)
            if lost is not None or store.check(["silent"]):
                lost, reporter = map(int, store.compare_set("silent", "", f"{lost} {rank}").decode().split())
                end(lost, rank, seconds, remedy, report, first=reporter == rank)
        store.add(f"heartbeats/{rank}", ENDED)
    except RuntimeError:  # the process that hosts the store has ended; `failures.py` detects this
        return


def end(
    lost: int, rank: int, seconds: float, remedy: str, report: Callable[[str, bool], None], *, first: bool
) -> NoReturn:
    """Print a message and end this process; only the `first` process to report prints the reason."""
    sentence = f"rank {rank} ended because rank {lost} does not answer"
    if first:
        sentence = f"rank {lost} has not answered for {seconds:g} seconds: look at its node; {remedy}"
    report(sentence, first)
    print(f"onward: {sentence}", file=sys.stderr, flush=True)
    os._exit(2)
