"""Whole tensors and their parts: DTensors of a mesh with the axes replicate, shard and tensor.

FSDP2 shards the part of a tensor that tensor parallelism assigns to a process. A tensor divided along both axes is
therefore split over `tensor` first and over `shard` second, the reverse of the order of the axes in the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This process's part, detached, without a copy; a plain tensor is its own part."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def splits(tensor: Tensor) -> list[tuple[int, int, int, distributed.ProcessGroup]]:
    """The divisions of a tensor, in order: (dimension, number of parts, index of this process's part, group); none for
    a plain tensor."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [
        (placement.dim, mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis))
        for axis, placement in reversed([*enumerate(tensor.placements)])
        if hasattr(placement, "dim") and mesh.size(axis) > 1
    ]


def piece(tensor: Tensor, dim: int, parts: int, part: int) -> Tensor:
    """One of `parts` equal pieces along a dimension; the last ones may be smaller or empty."""
    size = -(-tensor.size(dim) // parts)
    start = min(part * size, tensor.size(dim))
    return tensor.narrow(dim, start, min(size, tensor.size(dim) - start))


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """A view of the part that this process would hold if `full` were divided as `like` is."""
    for dim, parts, part, _ in splits(like):
        full = piece(full, dim, parts, part)
    return full


def divided(full: Tensor, like: Tensor) -> Tensor:
    """A copy of a full tensor on the device of `like`, divided as `like` is if it has the same shape."""
    if not isinstance(like, DTensor) or full.shape != like.shape:
        return full.to(like.device, copy=True)
    return from_part(part_of(full, like).contiguous().to(like.device, copy=True), like)


def from_part(part: Tensor, like: DTensor) -> DTensor:
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def allocate(module: nn.Module, device: torch.device | str) -> None:
    """Move parameters to a device, in place; those on the meta device get undefined values."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # a head may share the embedding's parameter
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or parameter.device.type == torch.device(device).type:
                continue
            if parameter not in made:
                part = local(parameter)
                part = torch.empty_like(part, device=device) if part.is_meta else part.to(device)
                shared = from_part(part, parameter) if isinstance(parameter, DTensor) else part
                made[parameter] = nn.Parameter(shared, requires_grad=parameter.requires_grad)
            owner._parameters[name] = made[parameter]


def gathered(tensor: Tensor) -> Tensor:
    """The full tensor, detached; all processes that hold its parts must call this together."""
    return full_tensor(local(tensor), tensor)


def full_tensor(part: Tensor, like: Tensor) -> Tensor:
    """The full tensor of which `part` is this process's part, divided as `like` is; all processes must call this
    together."""
    divisions, shapes = splits(like), [like.shape]
    for dim, parts, index, _ in divisions:
        shapes.append(piece(torch.empty(shapes[-1], device="meta"), dim, parts, index).shape)
    for (dim, parts, _, group), full in zip(reversed(divisions), reversed(shapes[:-1])):
        size = -(-full[dim] // parts)
        padding = part.new_zeros(*part.shape[:dim], size - part.size(dim), *part.shape[dim + 1 :])
        pieces = all_gathered(torch.cat([part, padding], dim), parts, group)
        part = torch.cat(pieces, dim).narrow(dim, 0, full[dim])
    return part


def all_gathered(tensor: Tensor, count: int, group: distributed.ProcessGroup | None = None) -> list[Tensor]:
    """The tensors of all processes of a group, by rank, all of one shape; the group None has all processes."""
    if count == 1:
        return [tensor]
    tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(count)]
    distributed.all_gather(tensors, tensor.contiguous(), group=group)
    return tensors


def is_divided(model: nn.Module) -> bool:
    return hasattr(model, "pipeline") or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters by name; those of other pipeline stages are on the meta device."""
    own, pipeline = dict[str, Tensor](model.named_parameters()), getattr(model, "pipeline", None)
    return {name: own.get(name, outline) for name, outline in pipeline.outlines.items()} if pipeline else own


def counted_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters, except those that an earlier pipeline stage also holds."""
    pipeline = getattr(model, "pipeline", None)
    return [parameter for parameter in model.parameters() if not (pipeline and pipeline.is_copy(parameter))]


@contextmanager
def gathered_parameters(model: nn.Module) -> Iterator[None]:
    """A context manager under which trainable parameters and those of adapters are full; all processes must enter it
    together."""
    parameters: list[tuple[nn.Module, str, Any]] = [
        (module, name, parameter)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor) and (parameter.requires_grad or "_lora." in path)
    ]
    for module, name, parameter in parameters:
        module._parameters[name] = nn.Parameter(gathered(parameter))
    try:
        yield
    finally:
        for module, name, parameter in parameters:
            module._parameters[name] = parameter


def is_first_holder(tensor: Tensor) -> bool:
    """Whether this is the first of the processes that hold the same part; True for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return True
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements)
    return not any(place for place, kind in places if kind.is_replicate())
