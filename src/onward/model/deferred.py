"""Deferred parameters: parameters on the meta device whose values are read later, for example parameters of a stored
model, in a process that keeps only a part of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Read = Callable[[], Tensor]


def defer(parameter: nn.Parameter, read: Read) -> None:
    deferred: Any = parameter
    deferred.read = read


def read_of(parameter: Tensor) -> Read | None:
    return getattr(parameter, "read", None) if parameter.is_meta else None


def values(parameter: Tensor) -> Tensor:
    read = read_of(parameter)
    return read() if read else parameter


@torch.no_grad()
def assign(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Copy a tensor into a parameter. If the parameter is on the meta device, use the tensor as its deferred values."""
    if parameter.is_meta:
        defer(parameter, lambda: tensor)
    else:
        parameter.copy_(tensor)


def deferred_reads(model: nn.Module) -> dict[str, Read]:
    reads = {name: read_of(parameter) for name, parameter in model.named_parameters()}
    return {name: read for name, read in reads.items() if read}
