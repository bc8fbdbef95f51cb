"""RMSNorms, rotary positions and gates of many tokens: one kernel for the forward pass of each, other kernels for the
gradients.

Shapes: B batch, T tokens, H heads, E d_head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from onward.config.feedforward_parts import ActivationName
from onward.kernels.llvm import fused
from onward.kernels.memory import DTYPES, address, buffer, launch, run


class RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
        x, width = x.contiguous(), x.size(-1)
        ctx.norm = fused.NormForm(width, DTYPES[x.dtype], DTYPES[weight.dtype], DTYPES[dtype], eps, offset)
        (y, target), (factors, of_rows) = buffer(x.shape, dtype), buffer((x.numel() // width,), torch.float32)
        launch(fused.rms_norm(ctx.norm), target, of_rows, x, weight, items=len(factors))
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
            launch(fused.rms_norm_gradient(ctx.norm), target, outer, x, weight, factors, items=len(factors))
        if ctx.needs_input_grad[1]:
            sums, target = buffer(weight.shape, torch.float32)
            kernel, items = fused.rms_norm_weight_gradient(ctx.norm), fused.column_items(len(weight))
            launch(kernel, target, outer, x, factors, len(factors), items=items)
            of_weight = sums.to(weight.dtype)
        return of_x, of_weight, None, None, None


class Rotation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys x (B, T, H, E) as `plain_rotate` does, without gradient support."""
    kernel = fused.rotation(x.size(2), x.size(3), cos.size(-1), DTYPES[x.dtype])
    tables = (table.expand(len(x), -1, -1, -1).contiguous() for table in (cos, sin))
    return run(kernel, x.contiguous(), *tables, items=x.size(0) * x.size(1))


class Gate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, activation: ActivationName) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.activation = activation
        return run(fused.gate(activation, DTYPES[x.dtype]), x, y, items=x.numel())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        (of_x, x_target), (of_y, y_target) = buffer(x.shape, x.dtype), buffer(x.shape, x.dtype)
        kernel = fused.gate_gradient(ctx.activation, DTYPES[x.dtype])
        launch(kernel, x_target, y_target, grad.contiguous(), x, y, items=x.numel())
        return of_x, of_y, None
