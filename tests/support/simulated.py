"""Simulates one rank of many in one process: a step of a real Trainer with fake tensors in torch's fake process
group."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onward import Batch, Decoder, DecoderConfig, StepConfig, StepPlan, Trainer
from onward.checkpoint.source import SizeLimit
from onward.config.mesh import Mesh
from onward.model import SigmoidRoutingModule
from onward.parallel import parallelize
from onward.parallel.parts import local
from onward.parallel.pipeline import Absent
from onward.parallel.processes import Processes
from onward.planning.dry import Shortened
from onward.planning.traffic import collectives
from onward.training import Balance, optimizers

Key = tuple[str, str]  # axis ("": all processes) and kind of collective

SIZES = {  # by collective: its kind, index of the argument whose bytes count, index of the group argument
    "c10d.allreduce_": ("all-reduce", 0, 1),
    "c10d.allgather_": ("all-gather", 0, 2),
    "c10d._allgather_base_": ("all-gather", 0, 2),
    "c10d._reduce_scatter_base_": ("reduce-scatter", 1, 2),
    "_c10d_functional.all_reduce": ("all-reduce", 0, 2),
    "c10d.send": ("send", 0, 1),
    "c10d.broadcast_": ("broadcast", 0, 1),
}


def is_vote(tensors: Any) -> bool:
    """Whether a pipeline stage sends integers, as in the exchange of hidden-state shapes before the first step."""
    return not tree_leaves(tensors)[0].is_floating_point()


class Counted(TorchDispatchMode):
    """Counts collectives and their bytes, by axis and kind. Values that the host reads from fake tensors are 1."""

    def __init__(self, processes: Processes) -> None:
        super().__init__()
        self.calls, self.bytes = Counter[Key](), Counter[Key]()
        devices: Any = processes.devices
        axes = devices.mesh_dim_names if devices else ()
        self.axes = {devices.get_group(axis).group_name: axis for axis in axes if devices[axis].size() < devices.size()}
        if processes.stage is not None:
            self.axes[processes.stage.group_name] = "stage"
        if processes.context is not None and processes.mesh.context < processes.count:
            self.axes[processes.context.group_name] = "context"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        if (counted := SIZES.get(func.name().replace("::", "."))) and not (counted[0] == "send" and is_vote(args[0])):
            kind, tensors, group = counted
            given: Any = args[group]
            name = given if isinstance(given, str) else distributed.ProcessGroup.unbox(given).group_name
            key = self.axes.get(name, ""), kind
            self.calls[key] += 1
            self.bytes[key] += sum(tensor.nbytes for tensor in tree_leaves(args[tensors]))
        return func(*args, **(kwargs or {}))


class Allocated(TorchDispatchMode):
    """Tracks the live storages. FSDP frees gathered weights by resizing their storages to 0, so their current sizes are
    summed."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = dict[int, Any]()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        self.peak = max(self.peak, self.now)
        return result

    def add(self, tensor: Tensor) -> None:
        """Track the storage of a tensor."""
        storage = local(tensor).untyped_storage()
        known = self.storages.get(storage._cdata)
        if known is None or known() is None:
            self.storages[storage._cdata] = weakref.ref(storage)

    @property
    def now(self) -> int:
        """The bytes of the live storages."""
        live = {key: storage for key, ref in self.storages.items() if (storage := ref()) is not None}
        self.storages = {key: self.storages[key] for key in live}
        return sum(storage.nbytes() for storage in live.values())


@dataclass(frozen=True)
class Simulated:
    """A step of one rank: bytes by kind of memory, and the calls and the bytes of its collectives by axis and kind."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    peak: int
    calls: Counter[Key]
    bytes: Counter[Key]


class Uncounted(Balance):
    """Does not count the tokens of experts, because fake tensors have no values."""

    def watch(self, *_: object) -> None:
        pass

    def auxiliary(self) -> float:
        softmax = [router for router in self.routers.values() if not isinstance(router, SigmoidRoutingModule)]
        if softmax and self.processes.context is not None:
            distributed.all_reduce(torch.cat([*self.counts][: len(softmax)]), group=self.processes.context)
        return 0.0


@contextmanager
def fake_processes(mesh: Mesh, stage: int = 0) -> Iterator[Processes]:
    """The first process of a mesh, or of one of its pipeline stages, in a group whose collectives do nothing."""
    distributed.init_process_group("fake", rank=stage * mesh.stage, world_size=mesh.count)
    try:
        yield Processes(stage * mesh.stage, mesh.count, None, mesh).connected(torch.device("cpu"))
    finally:
        distributed.destroy_process_group()


def gathered_bytes(model: Any) -> int:
    """The bytes of gathered weights, and of the buffers that receive them."""
    parts = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        return 0
    params = [param for state in parts for group in state._fsdp_param_groups for param in group.fsdp_params]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for p in params for t in p.all_gather_outputs}
    waiting = getattr(parts[0]._comm_ctx, "all_gather_state", None)  # None before the first forward pass
    buffer = waiting.all_gather_result.all_gather_output.untyped_storage().nbytes() if waiting else 0
    return buffer + sum(storage.nbytes() for storage in storages.values())


def sum_of_nothing(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Replaces the gradient hook of replicas, since the fake group's futures have no values."""
    distributed.all_reduce(bucket.buffer())
    done = torch.futures.Future[Tensor]()
    done.set_result(bucket.buffer())
    return done


def simulated(
    config: DecoderConfig,
    mesh: Mesh,
    rows: int,
    length: int,
    *,
    precision: Literal["fp32", "bf16"] = "bf16",
    optimizer: str = "adamw",
    recompute: bool = False,
    stage: int = 0,
) -> Simulated:
    """Simulate a training step on the first of many ranks, with one batch, or on the first rank of a pipeline stage,
    with one batch per stage."""
    replicas = patch.object(parallelize, "sum_of_bucket", sum_of_nothing)
    with fake_processes(mesh, stage) as processes, SizeLimit(1 << 62), replicas, patch.object(parallelize, "allocate"):
        with torch.device("meta"):
            model: Any = Decoder(config)
        model.hidden = lambda tokens, positions: model.hidden_of_checked(tokens, positions, None)
        groups: dict[str, Any] = {"devices": processes.devices, "context": processes.context}
        parallelize.parallelize(model, mesh, precision=precision, recompute=recompute, **groups)
        counted, allocated = Counted(processes), Allocated()
        with FakeTensorMode(allow_non_fake_inputs=True), Shortened():
            model.to_empty(device="cpu")
            if config.tied and not isinstance(model.head, Absent):
                model.head.weight = model.embed.weight
            trainer = Trainer(
                model,
                optimizers(model, optimizer, 1e-3, 0.1, (0.9, 0.99), {}, processes),
                lambda step: 1e-3,
                StepConfig(clip=1.0, precision=precision),
                processes=processes,
                balance=Uncounted(model, 0.0, 0.0, processes),
            )
            marks = list[int]()
            gradients = list[int]()
            mark: Any = lambda *_: marks.append(allocated.now - gathered_bytes(model))
            own = [block for block in model.blocks if not isinstance(block, Absent)]
            own[-1].register_forward_hook(mark, prepend=True)  # called before all tokens are gathered

            def before_update(*_: object) -> None:
                gradients.append(sum(local(p.grad).nbytes for p in model.parameters() if p.grad is not None))
                marks.append(allocated.peak)

            trainer.optimizers[0].register_step_pre_hook(before_update)
            batch = Batch(torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length, dtype=torch.int64))
            for parameter in model.parameters():
                allocated.add(parameter)
            mark()
            with allocated, counted:
                trainer.train_step(StepPlan([batch] * mesh.pipeline))
        states = [t for o in trainer.optimizers for s in o.state.values() for t in s.values() if t.ndim]
        weights = sum(local(p).nbytes for p in model.parameters())
    state = sum(local(tensor).nbytes for tensor in states)
    # buckets of replicas, which the reducer allocates without being tracked
    buckets = 0 if mesh.divides else gradients[0]
    peak = state + marks[-1] + buckets
    at_most = marks[mesh.pipeline - stage]  # memory after the last forward pass before the first backward pass
    return Simulated(weights, gradients[0], state, at_most - marks[0], peak, counted.calls, counted.bytes)


def planned(
    config: DecoderConfig, mesh: Mesh, rows: int, length: int, **options: Any
) -> tuple[Counter[Key], Counter[Key]]:
    """The calls and the bytes of the collectives that a plan lists."""
    calls, sizes = Counter[Key](), Counter[Key]()
    for one in collectives(config, mesh, rows, length, **options):
        axis = "" if one.devices == mesh.count else one.axis
        calls[axis, one.kind] += one.calls
        sizes[axis, one.kind] += one.bytes
    return calls, sizes
