"""The processes of a run: how they connect, the values that they sum, and the checks that they train the same run."""

import atexit
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import DeviceMesh

from onward.base.errors import UserError
from onward.config.mesh import Mesh
from onward.data.windows import Batch
from onward.parallel.context import own_batch
from onward.parallel.parallelize import device_mesh, release_replicas
from onward.parallel.replicas import Replicas

T = TypeVar("T")
LAUNCHES: list["Launch"] = []  # empty until the processes have connected, then one
AGREED = itertools.count()  # numbers of the calls of `agreed`, the same in all processes
PATIENCE = 600.0  # seconds that processes wait for each other when they join


def leave() -> None:
    """Leave torch's process group, if one was joined; called when Python exits."""
    LAUNCHES.clear()
    connected_devices.cache_clear()
    release_replicas()
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
                f"rank {other} has not answered within {PATIENCE:g} seconds: look at its node, and start all again"
            ) from None


@contextmanager
def meeting() -> Iterator[None]:
    """A context in which processes connect; converts a failure into a UserError that names its cause."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')}, and the processes cannot meet ({error}): start them with "
            "torchrun, or unset WORLD_SIZE"
        ) from None
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise UserError(f"the processes cannot meet at {where} ({reason}): choose another --master-port") from None


@cache  # each group keeps threads and sockets until the process ends, so runs on equal meshes share groups
def connected_devices(mesh: Mesh, device: str, group: object) -> dict[str, Any]:
    """Return the fields `devices`, `stage` and `context` of Processes for the processes of the torch `group` and their
    devices of the type `device`; all processes must call this together."""
    stage = distributed.new_subgroups(mesh.stage)[0] if mesh.pipeline > 1 else None
    context = None
    if mesh.context > 1:
        groups = torch.arange(mesh.count).view(-1, mesh.context, mesh.tensor).mT.flatten(0, 1)
        context, _ = distributed.new_subgroups_by_enumeration(groups.tolist())
    return {"devices": device_mesh(mesh, torch.device(device)), "stage": stage, "context": context}


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
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())  # % for --device cpu
            with meeting():
                store, rank, count = next(distributed.rendezvous("env://"))
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it outlives processes that are restarted
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


@dataclass(frozen=True)
class Processes:
    """The processes that train one model: the rank of this process, the number of processes that torchrun started, and
    their mesh, the axes along which they replicate or divide the model. Without torchrun, rank 0 of 1 process."""

    rank: int = 0
    count: int = 1
    store: distributed.Store | None = None  # store for small values that all processes see; None for one process
    mesh: Mesh = Mesh()  # arrangement of the processes
    devices: DeviceMesh | None = None  # torch's DeviceMesh; None if each process holds the whole model
    stage: distributed.ProcessGroup | None = None  # processes of the same pipeline stage; None: all
    context: distributed.ProcessGroup | None = None  # processes that divide the tokens of the same windows

    @classmethod
    def join(cls, size: int = 0) -> "Processes":
        """Join a process group and return its processes: all processes that torchrun started or, if `size` is given,
        the `size` processes with consecutive ranks that include this one. A process stays in the group that it joined
        first. Raises a UserError if the processes cannot connect, or if one does not answer."""
        launch = Launch.meet()
        size = size or launch.count
        if launch.store is None or size == 1:
            return cls()
        number, rank = divmod(launch.rank, size)
        store = distributed.PrefixStore(f"group/{number}", launch.store)
        if not distributed.is_initialized():
            # imported later, its functions' default arguments would keep the group and its threads alive
            from torch.distributed.nn import functional  # noqa: F401

            # the first process prepares the data alone, which may take hours
            day = timedelta(days=1)
            with meeting():
                group = distributed.PrefixStore("torch", store)
                distributed.init_process_group(store=group, rank=rank, world_size=size, timeout=day)
        return cls(rank, size, store, Mesh(replicate=size))

    def arranged(self, mesh: Mesh) -> "Processes":
        """Return these processes with another mesh, along which they replicate or divide the model. Raises a UserError
        if the mesh is for another number of processes."""
        mesh.check_count(self.count)
        return replace(self, mesh=mesh)

    def connected(self, device: torch.device) -> "Processes":
        """Return these processes with torch's DeviceMesh over their devices of the type of `device`, if the mesh
        divides the model; all processes must call this together."""
        if not self.mesh.divides:
            return replace(self, devices=None)
        return replace(self, **connected_devices(self.mesh, device.type, distributed.group.WORLD))

    @property
    def replicas(self) -> Replicas:
        """The replicas of the model that these processes hold, which divide the batches of an evaluation."""
        return Replicas(self.rank, self.mesh, self.devices)

    def agreed(self, value: Callable[[], str]) -> str:
        """Return the text that rank 0 computes by calling `value`; the other processes wait for the text and return it,
        too."""
        if self.store is None:
            return value()
        key = f"agreed/{next(AGREED)}"
        if not self.rank:
            self.store.set(key, value())
        return self.store.get(key).decode()

    @property
    def batch_rank(self) -> int:
        """The index of this process among the processes that have batches of their own; processes along the pipeline,
        context or tensor axis share their batches and have the same index."""
        return self.rank % self.mesh.stage // (self.mesh.context * self.mesh.tensor)

    def own_tokens(self, batch: Batch) -> Batch:
        """Return the part of a batch that this process trains on: with a context axis, the tokens of this process in
        each window (see `own_batch`); otherwise the entire batch. Raises a UserError if the axis does not divide the
        windows."""
        self.mesh.check_length(batch.tokens.size(1))
        return own_batch(batch, self.mesh.context, self.rank // self.mesh.tensor % self.mesh.context)

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        self.sum([0.0])

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """A context that rank 0 enters at once, and the other processes when rank 0 has left it."""
        if self.rank:
            self.wait()
        yield
        if not self.rank:
            self.wait()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each of the `values` over all processes."""
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor)
        return tensor.tolist()

    def sum_of_batches(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each of the `values` over the processes that have batches of their own; processes along the
        pipeline or tensor axis, which share their batches, count once."""
        return [value / (self.mesh.pipeline * self.mesh.tensor) for value in self.sum(values)]

    def of_batches(self, value: T) -> list[T]:
        """Gather the `value` of each process that has batches of its own, in the order of `batch_rank`. All processes
        must call this together."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, (self.batch_rank, value))
        return list(dict(values).values())

    def sum_of_stages(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each of the `values` over the stages of a pipeline; processes of a stage have equal
        values."""
        return [value / self.mesh.stage for value in self.sum(values)] if self.mesh.pipeline > 1 else list(values)

    def check_batches(self, batches: int) -> None:
        """Raise a UserError if a step has too few batches (`batches`) for each process with batches of its own to
        compute one per stage. With shards or stages, these processes must also have the same number of batches."""
        count = self.mesh.data
        if batches < count:
            raise UserError(
                f"accumulation is {batches} for {count} processes, and each needs a batch: start fewer processes, "
                f"or a run with --accumulation {count}"
            )
        if batches < count * self.mesh.pipeline:
            raise UserError(
                f"accumulation is {batches}, and each of the {self.mesh.pipeline} stages of mesh {str(self.mesh)!r} "
                f"computes another batch at the same time: give --accumulation {count * self.mesh.pipeline} or more"
            )
        if self.mesh.pipeline * self.mesh.shards > 1 and batches % count:
            more = -(-batches // count) * count
            raise UserError(
                f"accumulation is {batches}, and {count} processes of mesh {str(self.mesh)!r} compute equally many "
                f"batches: give --accumulation {more}"
            )

    def check_windows(self, windows: int) -> None:
        """Raise a UserError if there are fewer windows (training sequences) than processes with windows of their
        own."""
        if windows < self.mesh.data:
            raise UserError(
                f"the data have {windows:,} windows for {self.mesh.data} processes with windows of their own: start "
                "fewer processes, give more text, or shorten --model.context-length"
            )

    def check_same(self, facts: dict[str, object], of_part: Collection[str] = ()) -> None:
        """Raise a UserError in all processes if the `facts`, values by name such as checksums, differ between
        processes: each is compared with that of rank 0. Facts named in `of_part` describe the part of the model that a
        process holds, and are compared with those of the first process that holds the same part."""
        if self.count == 1:
            return
        of_ranks: list[Any] = [None] * self.count
        distributed.all_gather_object(of_ranks, facts)
        for rank, other in enumerate(of_ranks):
            stage, place = divmod(rank, self.mesh.stage)
            same_part = stage * self.mesh.stage + place % (self.mesh.shards * self.mesh.tensor)
            first = {name: of_ranks[same_part if name in of_part else 0][name] for name in facts}
            if differ := [name for name, value in first.items() if other[name] != value]:
                known = same_part if {*differ} <= {*of_part} else 0
                versions = [f"{name} ({first[name]}, {other[name]})" for name in differ if name.startswith("version")]
                remedy = "install the same on all" if versions else "give all ranks one run folder, on a shared disk"
                raise UserError(
                    f"the ranks hold different runs: rank {rank} differs from rank {known} in "
                    f"{' and '.join(versions or differ)}; {remedy}"
                )

    def sum_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over the processes of a stage, in place."""
        if self.mesh.stage > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor, group=self.stage)
