"""Norms, rotations and gates of many tokens: one kernel each, instead of five to nine operations of PyTorch.

On a CPU. Without gradients (`linear.takes_kernels`) a kernel is compiled, in some 50 ms, once PyTorch has computed
about as many numbers as it would in that time, so that short work never waits for it. Where gradients are needed, norms
and rotations have kernels for both directions from the first step on, so that a resumed run repeats every bit.
Shapes: B batch, T tokens, H heads, E d_head, N = B T.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from onward.config.decoder import Activation
from onward.kernels.memory import address, buffer, fits
from onward.model.linear import MIN_PARALLEL, compiled, kernels_can_read, takes_kernels

COMPILED_AFTER = 1 << 24  # numbers
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
counted = Counter[str]()  # the numbers that PyTorch has computed, by the name of the kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor | None:
    """The norm of x (..., width) in a dtype, by a kernel; None where PyTorch is to compute it."""
    if weight.dtype not in DTYPES or dtype not in DTYPES or not worth("rms_norm", x):
        return None
    if not (fits(weight, weight.dtype, x.size(-1)) and weight.is_contiguous()):
        return None
    return RMSNorm.apply(x, weight, eps, offset, dtype)  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """x (B, T, H, E) rotated by angles (B, T, 1, half), by a kernel; None where PyTorch is to do it."""
    if x.dim() != 4 or not 0 < 2 * cos.size(-1) <= x.size(-1) or not worth("rotation", x):
        return None
    if not all(fits(table, torch.float32, *x.shape[:2], 1, cos.size(-1)) for table in (cos, sin)):
        return None
    return Rotation.apply(x, cos, sin)  # type: ignore[no-any-return]


def gate(x: Tensor, y: Tensor, activation: Activation) -> Tensor | None:
    """activation(x) * y, both contiguous and of one shape, by a kernel; None where PyTorch is to compute it."""
    if torch.is_grad_enabled() or not worth("gate", x):
        return None
    if not all(fits(each, x.dtype, *x.shape) and each.is_contiguous() for each in (x, y)):
        return None
    return run(kernels().gate(activation, DTYPES[x.dtype]), x, y, items=x.numel())


def worth(name: str, x: Tensor) -> bool:
    """Whether a kernel is to compute the result for x: there is much of it, now and before, or gradients are needed."""
    if x.numel() < MIN_PARALLEL or x.dtype not in DTYPES:
        return False
    if torch.is_grad_enabled():
        if not kernels_can_read(x):
            return False
    elif not takes_kernels(x):
        return False
    elif counted[name] < COMPILED_AFTER:
        counted[name] += x.numel()
        return False
    return compiled(DTYPES[x.dtype], x.dtype, False) is not None  # what compiles products compiles these


class RMSNorm(torch.autograd.Function):
    """x (..., width) / sqrt(mean(x ** 2) + eps) * (weight + offset)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
        x, width = x.contiguous(), x.size(-1)
        ctx.norm = kernels().Norm(width, DTYPES[x.dtype], DTYPES[weight.dtype], DTYPES[dtype], eps, offset)
        (y, target), (factors, of_rows) = buffer(x.shape, dtype), buffer((x.numel() // width,), torch.float32)
        launch(kernels().rms_norm(ctx.norm), target, of_rows, x, weight, items=len(factors))
        ctx.save_for_backward(x, weight, factors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, factors), of_x, of_weight = ctx.saved_tensors, None, None
        grad = grad.contiguous()
        outer = address(grad, getattr(torch, ctx.norm.out_dtype), *x.shape)
        if ctx.needs_input_grad[0]:
            of_x, target = buffer(x.shape, x.dtype)
            kernel = kernels().rms_norm_gradient(ctx.norm)
            launch(kernel, target, outer, x, weight, factors, items=len(factors))
        if ctx.needs_input_grad[1]:
            sums, target = buffer(weight.shape, torch.float32)
            kernel, items = kernels().rms_norm_weight_gradient(ctx.norm), kernels().column_items(len(weight))
            launch(kernel, target, outer, x, factors, len(factors), items=items)
            of_weight = sums.to(weight.dtype)
        return of_x, of_weight, None, None, None


class Rotation(torch.autograd.Function):
    """x (B, T, H, E) rotated by angles; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, -sin), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, E) rotated by the kernel."""
    kernel = kernels().rotation(x.size(2), x.size(3), cos.size(-1), DTYPES[x.dtype])
    return run(kernel, x.contiguous(), cos.contiguous(), sin.contiguous(), items=x.size(0) * x.size(1))


def run(kernel: Callable[..., None], x: Tensor, *others: Tensor, items: int) -> Tensor:
    """Call a kernel that writes a tensor like x."""
    y, target = buffer(x.shape, x.dtype)
    launch(kernel, target, x, *others, items=items)
    return y


def launch(kernel: Callable[..., None], *arguments: Tensor | int, items: int) -> None:
    """Call a kernel with the addresses of contiguous tensors, and numbers."""
    values = (address(each, each.dtype, *each.shape) if isinstance(each, Tensor) else each for each in arguments)
    kernel(*values, items, torch.get_num_threads())


def kernels() -> Any:
    """The module of the kernels, which imports the compiler."""
    from onward.kernels.llvm import fused

    return fused
