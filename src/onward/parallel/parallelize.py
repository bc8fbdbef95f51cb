"""Parallel training of a finished decoder, without changes to its code. The wrappers for compiling and recomputing
blocks nest in the order of `attachments.KINDS`, and FSDP2 wraps the blocks last, as in torchtitan (Liang et al. 2024).
Unlike here, torchtitan splits stages first and compiles the checkpointing as well (see docs/decisions.md)."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from onward.config.mesh import Mesh
from onward.model.attachments import attach
from onward.model.decoder import Decoder
from onward.model.divided import inside, resharded
from onward.parallel.context import DividedTokens
from onward.parallel.parts import allocate, is_first_holder, local
from onward.parallel.pipeline import Absent, Pipeline, split
from onward.parallel.tensor import divide_layers
from onward.parallel.unsharded import UnshardedCopy
from onward.transforms.compiling import compile_blocks
from onward.transforms.recompute import recompute_blocks

REPLICAS = WeakSet[DistributedDataParallel]()


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Return torch's DeviceMesh of all processes, with the axes pipeline, replicate, shard and tensor, over which
    weights are divided or replicated; they are also sharded over the processes of a context axis. The processes must
    have joined their group."""
    axes = {"pipeline": mesh.pipeline, "replicate": mesh.replicate, "shard": mesh.shards, "tensor": mesh.tensor}
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def parallelize(
    model: Decoder,
    mesh: Mesh,
    devices: DeviceMesh | None,
    *,
    context: distributed.ProcessGroup | None = None,
    precision: str = "fp32",
    compile: bool = False,
    recompute: bool = False,
    fill: Callable[[Decoder], object] = lambda model: None,
) -> None:
    """Divide a decoder over a mesh, in place; with `compile`, compile its blocks, and with `recompute`, recompute their
    activations in the backward pass. The decoder is on the meta device or has equal weights in all processes. `devices`
    is the mesh of torch, None for one process; `context` is the group of the processes that divide the tokens of the
    same windows, None without a context axis.

    Parameters on the meta device get memory, block by block, and undefined values: `fill` is then called with the model
    to set them.

    Parameters become DTensors if shards or a tensor axis divide the model. In "bf16" the parameters of blocks are
    gathered in bf16, the dtype in which autocast computes matmuls; gradients are summed in the dtype of the weights.
    Raises a UserError for more stages than blocks, and for a size or a part that the tensor axis cannot divide.
    """
    mesh.check_decoder(model.config)
    changed: Any = model
    if mesh.shard > 1 and mesh.tensor == mesh.pipeline == 1:
        changed.unsharded_copy = UnshardedCopy(model)
    if compile:
        compile_blocks(model)
    if mesh.tensor > 1 and devices is not None:
        divide_layers(model, devices["tensor"])
    if context is not None:
        DividedTokens.of_group(model, context)
    if recompute:
        recompute_blocks(model)
    if mesh.pipeline > 1 and devices is not None:
        split(model, devices["pipeline"])
    if mesh.divides and mesh.summed > 1 and devices is not None:
        hybrid = mesh.replicate > 1 or mesh.shards == 1
        shard(model, devices["replicate", "shard"] if hybrid else devices["shard"], precision)
    allocate(model, devices.device_type if devices else "cpu")
    fill(model)


def shard(model: Any, mesh: DeviceMesh, precision: str) -> None:
    """Divide the parameters, gradients and optimizer state of a decoder over the last axis of a mesh, block by block
    (FSDP2); with `precision` "bf16" the weights of blocks are gathered in bf16. Gradients are summed, not averaged."""
    low: Any = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=model.dtype, cast_forward_inputs=False)
    count = mesh.size(-1)
    placement: Any = lambda parameter: Shard(shard_dim(local(parameter).shape, count))
    for block in (block for block in model.blocks if not isinstance(block, Absent)):
        allocate(block, mesh.device_type)
        fully_shard(block, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
    allocate(model, mesh.device_type)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support PREMUL_SUM
    model.inside = MethodType(call, model)
    register_fsdp_forward_method(model, "inside")
    model.inside = OneForward(
        model, model.inside, partial(torch.autocast, mesh.device_type, low) if low else nullcontext
    )
    attachment = attach(model, "shards", f"{count} processes divide the parameters (FSDP)")
    for method in "hidden", "logits":
        attachment.wrap(model, method, model.inside)


def shard_dim(shape: Sequence[int], count: int) -> int:
    """Return the dimension along which `count` processes divide a tensor of this shape: the first one, padded if
    necessary. A stack with fewer experts than processes is divided along the first dimension that `count` divides
    evenly, so that each process holds a part of every expert."""
    return next((dim for dim, size in enumerate(shape) if size >= count and not (dim and size % count)), 0)


def call(_: nn.Module, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Call a function with these arguments and return its result. FSDP treats this as a forward method of a sharded
    model (the first argument), so that the weights are gathered during the call."""
    return function(*inputs, **options)


class OneForward:
    """Calls functions as one forward pass of a sharded model, so that its weights are gathered during the calls. A call
    inside another call is part of the same forward pass, in the precision of the gathered weights. Without gradients
    the gathered weights are freed at the end of the outer call, if `frees`."""

    def __init__(
        self, model: nn.Module, begin: Callable[..., Any], precision: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.model, self.begin, self.precision, self.running = model, begin, precision, False
        self.frees = True  # whether to free gathered weights after a call without gradients

    def __call__(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if self.running:
            return function(*inputs, **options)
        self.running = True
        try:
            with self.precision():
                return self.begin(function, *inputs, **options)
        finally:
            self.running = False
            if self.frees and not torch.is_grad_enabled():
                resharded(self.model)


class Inside(nn.Module):
    """Calls `module`, a sharded model together with its loss, as one forward pass of `model`, so that gradients of
    weights that the loss reads itself, such as those of the head, are reduced too."""

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.model, self.module = model, module

    def forward(self, *inputs: Any) -> Any:
        return inside(self.model, self.module, *inputs)


def wrapped(module: nn.Module, model: nn.Module, mesh: Mesh, *, uses_all: bool) -> nn.Module:
    """Return `module`, which computes the loss of a parallelized `model`, wrapped, if processes share gradients, so
    that the backward pass sums them. `uses_all` says that each forward pass uses all trainable parameters, so that
    DistributedDataParallel need not look for unused ones."""
    if isinstance(model, FSDPModule):
        return Inside(model, module)
    if mesh.count == mesh.replicate > 1:
        replicas = DistributedDataParallel(
            module, gradient_as_bucket_view=True, find_unused_parameters=not uses_all, init_sync=False
        )
        replicas.register_comm_hook(None, sum_of_bucket)
        attach(model, "replicas", f"{mesh.replicate} processes, each with all parameters (DDP)")
        REPLICAS.add(replicas)
        return replicas
    return module


def release_replicas() -> None:
    """Drop the process groups that DistributedDataParallel modules hold, before Python exits: their threads must not
    outlive it."""
    for replicas in REPLICAS:
        for name in ("reducer", "logger", "process_group"):
            vars(replicas).pop(name, None)


def sum_of_bucket(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over the processes instead of averaging it; a communication hook of
    DistributedDataParallel."""
    done = distributed.all_reduce(bucket.buffer(), async_op=True).get_future()  # type: ignore[union-attr]
    return done.then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def accumulating(module: nn.Module, *, last: bool) -> AbstractContextManager[object]:
    """Return a context manager for the backward pass of one batch of a step with gradient accumulation; replicas sum
    their gradients over the processes only in that of the `last` batch."""
    if isinstance(module, Inside):
        sharded: Any = module.model
        sharded.set_requires_all_reduce(last)
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext()


def clip_gradients(parameters: Iterable[Tensor], limit: float, pipeline: Pipeline | None = None) -> float:
    """Scale the gradients of parameters in place so that their norm, over all processes, is at most `limit` (0: no
    limit), and return their norm before scaling. `pipeline` is that of the model, if it has stages."""
    trained = [p for p in parameters if p.grad is not None]
    grads = [p.grad for p in trained if p.grad is not None]
    if pipeline or any(isinstance(grad, DTensor) for grad in grads):
        counted = [g for p, g in zip(trained, grads) if not (pipeline and pipeline.is_copy(p))]
        norm = norm_of(counted, divided=True)
    else:
        norm = float(nn.utils.get_total_norm(grads))
    if limit and norm > limit:
        torch._foreach_mul_([local(grad) for grad in grads], limit / (norm + 1e-6))
    return norm


def norm_of(tensors: Sequence[Tensor], *, divided: bool) -> float:
    """Compute the norm of several tensors, such as gradients, taken together as one vector. If they are parts of a
    `divided` model, the norm includes the tensors of all processes, which must call this together."""
    norms = torch.stack([*map(torch.linalg.vector_norm, map(local, tensors))]).double()
    square = (norms * torch.tensor([is_first_holder(t) for t in tensors], device=norms.device)).square().sum()
    if divided:
        distributed.all_reduce(square)
    return float(square.sqrt())
