"""Notices a process that does not answer any more: one that is stopped, or whose machine is cut off. Collectives would
wait for it, and may wait long for good reasons, such as data that the first process prepares alone."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, NoReturn

from onward.errors import UserError
from onward.training.processes import Launch

PATIENCE = 600.0  # seconds without a heartbeat after which a process counts as lost
ENDED = 1 << 40  # added to the heartbeats of a process that has ended


def patience() -> float:
    """Return the seconds to wait for a silent process: those of the environment variable ONWARD_PATIENCE, by default
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
    """A context in which a thread counts this process's heartbeats in the store of all processes. The first process
    watches those of the others, the others those of the first.

    If one is silent for `patience()` seconds, all others end with status 2, since their collectives cannot be
    interrupted. One of them reports the rank, with the `remedy`. `report` is called before with the reason, and with
    whether this process gives the reason of all.
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
    """Send heartbeats and watch others until `stopped`; the arguments are those of `heartbeats`."""
    shared: Any = launch.store
    rank, store, interval = launch.rank, shared.clone(), min(5.0, seconds / 10)  # each thread needs its own client
    watched = [0] if rank else range(1, launch.count)
    heard, silent = dict.fromkeys(watched, -1), dict.fromkeys(watched, 0.0)
    try:
        while not stopped.wait(interval):
            store.add(f"heartbeats/{rank}", 1)
            for other in watched:
                beats, before = store.add(f"heartbeats/{other}", 0), heard[other]
                # its own intervals are counted, not a clock: this process may have been stopped as well
                silent[other] = silent[other] + interval if beats == before and beats < ENDED else 0.0
                heard[other] = beats
            lost = next((other for other in watched if silent[other] >= seconds), None)
            if lost is not None or store.check(["silent"]):
                lost, reporter = map(int, store.compare_set("silent", "", f"{lost} {rank}").decode().split())
                end(lost, rank, seconds, remedy, report, first=reporter == rank)
        store.add(f"heartbeats/{rank}", ENDED)
    except RuntimeError:  # the store has ended with the process that keeps it, which others notice
        return


def end(
    lost: int, rank: int, seconds: float, remedy: str, report: Callable[[str, bool], None], *, first: bool
) -> NoReturn:
    """End this process with a sentence; only the `first` gives the reason."""
    sentence = f"rank {rank} ended because rank {lost} does not answer"
    if first:
        sentence = f"rank {lost} has not answered for {seconds:g} seconds: look at its node; {remedy}"
    report(sentence, first)
    print(f"onward: {sentence}", file=sys.stderr, flush=True)
    os._exit(2)
