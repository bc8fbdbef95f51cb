"""The processes that train one model: the values that they agree on and sum, their parts of a model and of its updates,
and the checks that they train the same run."""

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed import DeviceMesh

from onward.base.alone import Alone
from onward.base.errors import UserError
from onward.config.mesh import Mesh
from onward.model.decoder import Decoder
from onward.parallel.context import own_batch
from onward.parallel.launch import AT_EXIT, Launch, meeting
from onward.parallel.parallelize import (
    accumulating,
    clip_gradients,
    device_mesh,
    norm_of,
    parallelize,
    release_replicas,
    wrapped,
)
from onward.parallel.parts import (
    all_gathered,
    counted_parameters,
    divided,
    full_tensor,
    gathered,
    gathered_parameters,
    is_divided,
    local,
    part_of,
    whole_parameters,
)
from onward.parallel.pipeline import Pipeline
from onward.parallel.replicas import Replicas

T = TypeVar("T")
AGREED = itertools.count()  # numbers the calls of `agreed`, equally in all processes


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


AT_EXIT += [connected_devices.cache_clear, release_replicas]


@dataclass(frozen=True)
class Processes(Alone):
    """The processes that train one model: the rank of this process among them, their number, and their mesh, the axes
    along which they replicate or divide the model. Without torchrun, rank 0 of 1 process.

    A trainer of one process has no such object. Other trainers use it to divide batches, sum gradients and metrics, and
    convert between full tensors and the parts of this process (see parts.py)."""

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
            # a later import would bind the group in default arguments, which would keep it and its threads alive
            from torch.distributed.nn import functional  # noqa: F401

            # the first process prepares the data alone, which may take hours
            day = timedelta(days=1)
            with meeting():
                group = distributed.PrefixStore("torch", store)
                distributed.init_process_group(store=group, rank=rank, world_size=size, timeout=day)
        return cls(rank, size, store, Mesh(replicate=size))

    def arranged(self, mesh: Mesh) -> "Processes":
        """Return these processes in a mesh. Raises a UserError if the mesh is for another number of processes."""
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
        return Replicas(self.rank, self.mesh, self.devices)

    def agreed(self, value: Callable[[], str]) -> str:
        if self.store is None:
            return value()
        key = f"agreed/{next(AGREED)}"
        if not self.rank:
            self.store.set(key, value())
        return self.store.get(key).decode()

    @property
    def batch_rank(self) -> int:
        return self.rank % self.mesh.stage // (self.mesh.context * self.mesh.tensor)

    @property
    def batch_count(self) -> int:
        return self.mesh.data

    @property
    def divides(self) -> bool:
        return self.mesh.divides

    def own_tokens(self, batch: T) -> T:
        """Return the part of a batch that this process trains on: with a context axis, the tokens of this process in
        each window (see `own_batch`); otherwise the entire batch. Raises a UserError if the axis does not divide the
        windows."""
        self.mesh.check_length(batch.tokens.size(1))  # type: ignore[attr-defined]
        return own_batch(batch, self.mesh.context, self.rank // self.mesh.tensor % self.mesh.context)

    def wait(self) -> None:
        self.sum([0.0])

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        if self.rank:
            self.wait()
        yield
        if not self.rank:
            self.wait()

    def sum(self, values: Sequence[float]) -> list[float]:
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor)
        return tensor.tolist()

    def sum_of_batches(self, values: Sequence[float]) -> list[float]:
        """Return the sums of `values` over the processes with batches of their own."""
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
        """Return the sums of `values` over the stages of a pipeline; processes of a stage have equal values."""
        return [value / self.mesh.stage for value in self.sum(values)] if self.mesh.pipeline > 1 else list(values)

    def check_batches(self, batches: int) -> None:
        """Raise a UserError if a step has too few batches (`batches`) for each process with batches of its own to
        compute one per stage. With shards or stages, these processes must also have the same number of batches."""
        count = self.mesh.data
        if batches < count:
            raise UserError(
                f"accumulation is {batches}, too few batches for {count} processes: start fewer processes, or a run "
                f"with --accumulation {count}"
            )
        if batches < count * self.mesh.pipeline:
            raise UserError(
                f"accumulation is {batches}, too few batches for the {self.mesh.pipeline} stages of mesh "
                f"{str(self.mesh)!r}, each of which works on a different batch: "
                f"give --accumulation {count * self.mesh.pipeline} or more"
            )
        if self.mesh.pipeline * self.mesh.shards > 1 and batches % count:
            more = -(-batches // count) * count
            raise UserError(
                f"accumulation is {batches}, which {count} processes of mesh {str(self.mesh)!r} cannot divide "
                f"evenly: give --accumulation {more}"
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
                remedy = "install the same versions" if versions else "give all ranks one run folder, on a shared disk"
                raise UserError(
                    f"the ranks hold different runs: rank {rank} differs from rank {known} in "
                    f"{' and '.join(versions or differ)}; {remedy}"
                )

    def sum_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over the processes of a stage, in place."""
        if self.mesh.stage > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor, group=self.stage)

    local, part_of, divided = staticmethod(local), staticmethod(part_of), staticmethod(divided)
    gathered, gathered_parameters = staticmethod(gathered), staticmethod(gathered_parameters)
    whole_parameters, counted_parameters = staticmethod(whole_parameters), staticmethod(counted_parameters)

    def parallelize(
        self,
        model: Decoder,
        *,
        precision: str,
        compile: bool = False,
        recompute: bool = False,
        fill: Callable[[Decoder], object] = lambda model: None,
    ) -> None:
        """Divide a decoder over the mesh, in place; see `parallelize.parallelize`."""
        options: dict[str, Any] = {"precision": precision, "compile": compile, "recompute": recompute, "fill": fill}
        parallelize(model, self.mesh, self.devices, context=self.context, **options)

    def pipeline(self, model: nn.Module) -> Pipeline | None:
        """Return the pipeline of a model that is divided into stages; None for other models."""
        pipeline: Pipeline | None = getattr(model, "pipeline", None)
        return pipeline

    def wrapped(self, module: nn.Module, model: nn.Module, *, uses_all: bool) -> nn.Module:
        return wrapped(module, model, self.mesh, uses_all=uses_all)

    def accumulating(self, module: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        return accumulating(module, last=last)

    def clip_gradients(self, parameters: Iterable[Tensor], limit: float, model: nn.Module) -> float:
        return clip_gradients(parameters, limit, self.pipeline(model))

    def norm(self, model: nn.Module, tensors: Sequence[Tensor]) -> float:
        """Return the norm of tensors of a model, such as its gradients, over all parts of the model."""
        return norm_of(tensors, divided=is_divided(model))

    def shared_work(
        self,
        function: Callable[[Sequence[Tensor]], Tensor],
        pairs: Sequence[tuple[Tensor, Tensor]],
        shape: Sequence[int],
    ) -> Iterator[Tensor]:
        """For each of `pairs`, (parameter, this process's part of a tensor of the same shape), yield the full result of
        a function. `function` computes the results, of equal `shape`, of several full tensors. The processes of a stage
        divide this work and exchange the results."""
        rank, count, own = self.rank % self.mesh.stage, self.mesh.stage, []
        for i, (p, part) in enumerate(pairs):
            full = full_tensor(part, p)
            if i % count == rank:
                own.append(full)
        done = function(own) if own else ()
        for i, (_, part) in enumerate(pairs):
            turn, owner = divmod(i, count)
            if owner == 0:
                mine = done[turn] if turn < len(done) else part.new_zeros(shape)
                shared = all_gathered(mine, count, self.stage)
            yield shared[owner]

    def finite(self, model: nn.Module) -> bool:
        """Return whether all weights of a model are finite, that is neither NaN nor infinite, in all processes."""
        finite = all(bool(local(p).isfinite().all()) for p in model.parameters())
        if not self.mesh.divides:
            return finite  # all processes have the same weights
        return self.sum([finite]) == [self.count]

    def checksum(self, model: nn.Module) -> str:
        """Compute a hash of this process's weights, as hexadecimal text, that changes if a single bit of them does."""
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = (local(p).contiguous().view(integers[p.element_size()]) for p in model.parameters())
        sums = [int(tensor.sum(dtype=torch.int64)) for tensor in bits]
        return hashlib.sha256(repr(sums).encode()).hexdigest()
