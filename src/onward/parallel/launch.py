"""Connects the processes that torchrun started."""

import atexit
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from onward.base.errors import UserError

LAUNCHES: list["Launch"] = []  # empty until the processes have connected, then with one element
AT_EXIT: list[Callable[[], object]] = []  # callbacks that release process groups before Python exits
PATIENCE = 600.0  # seconds that processes wait for each other when they join


def leave() -> None:
    """Leave torch's process group, if one was joined; called when Python exits."""
    LAUNCHES.clear()
    for release in AT_EXIT:
        release()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def await_all(store: distributed.Store, rank: int, count: int) -> None:
    """Wait until all `count` processes have called this function with torch's key-value `store`, which they share.
    Raises a UserError that names the first process that has not done so within ten minutes."""
    store.set(f"here/{rank}", "")
    until = time.monotonic() + PATIENCE
    for other in range(count):
        left = max(0.001, until - time.monotonic())
        try:
            store.wait([f"here/{other}"], timedelta(seconds=left))
        except RuntimeError:
            raise UserError(
                f"rank {other} has not answered within {PATIENCE:g} seconds: look at its node, and restart "
                "all processes"
            ) from None


@contextmanager
def meeting() -> Iterator[None]:
    """A context manager for connecting processes; converts a failure into a UserError that names its cause."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"Cannot connect to the other processes of WORLD_SIZE={os.environ.get('WORLD_SIZE')} ({error}): start them "
            "with torchrun, or unset WORLD_SIZE"
        ) from None
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise UserError(f"the processes cannot connect at {where} ({reason}): choose another --master-port") from None


@dataclass(frozen=True)
class Launch:
    """The processes that torchrun started: the rank of this one, their number, and the key-value store that they share.
    Without torchrun, rank 0 of 1 process."""

    rank: int = 0
    count: int = 1
    store: distributed.Store | None = None

    @classmethod
    def meet(cls) -> "Launch":
        """Connect to the other processes if torchrun started more than one, according to its environment variables RANK
        and WORLD_SIZE. Raises a UserError if the processes cannot connect, or if one does not answer."""
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return cls()
        if not LAUNCHES:
            if torch.cuda.is_available():
                # with --device cpu, processes may outnumber GPUs
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            with meeting():
                store, rank, count = next(distributed.rendezvous("env://"))
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # a store that outlives restarts
                    store = distributed.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
                await_all(store, rank, count)
            LAUNCHES.append(cls(rank, count, distributed.PrefixStore("onward", store)))
            atexit.register(leave)  # the group's threads must not outlive Python
        return LAUNCHES[0]

    def check_command(self, words: Sequence[str]) -> None:
        """Raise a UserError in all processes if the arguments of their commands, `words`, differ, because only rank 0
        reads the arguments of a new run. All processes must call this together, once."""
        if self.store is None:
            return
        if not self.rank:
            self.store.set("command", json.dumps(words))
        pairs = itertools.zip_longest(words, json.loads(self.store.get("command")))
        if different := next((pair for pair in pairs if pair[0] != pair[1]), None):
            own, first = ("nothing" if word is None else repr(word) for word in different)
            self.store.set(
                "different",
                f"the command of rank {self.rank} differs from that of rank 0, with {own} instead of {first}: give all "
                "ranks the same command",
            )
        if self.store.add("compared", 1) == self.count:
            self.store.set("all compared", "")
        self.store.wait(["all compared"])  # so that no process waits for one that has failed
        if self.store.check(["different"]):
            raise UserError(self.store.get("different").decode())
