"""Autograd functions between the processes of a tensor axis (Shoeybi et al. 2019, section 3)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, distributed
from torch.distributed import DeviceMesh

from onward.parallel.parts import all_gathered, piece

reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor  # before 2.13


class Copy(torch.autograd.Function):
    """The autograd function of the input of a divided module: the identity. The backward pass sums the gradient over
    the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduced(grad, "sum", ctx.group), None


class Sum(torch.autograd.Function):
    """The autograd function of the output of a divided module: the sum over the processes. The backward pass returns
    the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return reduced(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Join(torch.autograd.Function):
    """The autograd function that concatenates the parts `x` of a tensor, one per process, along a dimension. In the
    backward pass, each process keeps its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return joined(x, dim, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return piece(grad, ctx.dim, ctx.mesh.size(), ctx.mesh.get_local_rank()), None, None


class Gather(torch.autograd.Function):
    """The autograd function of the input of a divided module if the tokens are divided: it concatenates the parts `x`
    of all processes along dimension 1, the tokens. The backward pass sums the gradients over the processes, and each
    process keeps its part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return joined(x, 1, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scattered(grad, ctx.mesh), None


class Scatter(torch.autograd.Function):
    """The autograd function of the output of a divided module if the tokens are divided: it sums `x` over the
    processes, and each process keeps its part of the sum along dimension 1, the tokens. The backward pass concatenates
    the parts of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return scattered(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return joined(grad, 1, ctx.mesh), None


class Own(torch.autograd.Function):
    """The autograd function that keeps this process's part, along dimension 1 (the tokens), of a tensor that all
    processes have. The backward pass concatenates the parts of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return piece(x, 1, mesh.size(), mesh.get_local_rank()).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return joined(grad, 1, ctx.mesh), None


def joined(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    return torch.cat(all_gathered(x, mesh.size(), mesh.get_group()), dim)


def scattered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return own_sum(x.split(x.size(1) // mesh.size(), 1), mesh.get_group())


def own_sum(parts: Sequence[Tensor], group: Any) -> Tensor:
    """Reduce-scatter without gradient: `parts` has one tensor for each process; returns the sum over all processes of
    their tensors for this process."""
    stacked = torch.stack([*parts]).contiguous()  # the strides of a gradient of keys may be in another order
    own = torch.empty_like(stacked[0])
    reduce_scatter(own, stacked.flatten(0, 1), group=group)
    return own


def reduced(x: Tensor, operation: str, group: Any) -> Tensor:
    """The sum or the elementwise maximum ("max") over the processes, without gradient."""
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), operation, group))
