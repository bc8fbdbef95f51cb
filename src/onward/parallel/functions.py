"""Autograd functions between the processes of a tensor axis (Shoeybi et al. 2019, section 3)."""

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import DeviceMesh

from onward.parallel.parts import all_gathered, piece


class Copy(torch.autograd.Function):
    """The autograd function of the input of a divided module: the identity, whose gradient is summed over the
    processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduced(grad, "sum", ctx.group), None


class Sum(torch.autograd.Function):
    """The autograd function of the output of a divided module: the sum over the processes; the gradient is passed on
    unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return reduced(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Join(torch.autograd.Function):
    """The autograd function that concatenates the parts `x` of a tensor, one per process, along a dimension in all
    processes; in the backward each process keeps its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return torch.cat(all_gathered(x, mesh.size(), mesh.get_group()), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return piece(grad, ctx.dim, ctx.mesh.size(), ctx.mesh.get_local_rank()), None, None


def reduced(x: Tensor, operation: str, group: Any) -> Tensor:
    """Return the sum (`operation` "sum") or the elementwise maximum ("max") of a tensor over the processes of a group,
    without gradient."""
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), operation, group))
