"""RMSNorm of many tokens: one kernel for the forward, two for the gradients.

Shapes: N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from onward.kernels.memory import address, buffer, fits
from onward.kernels.rules import DTYPES, emitter, is_worth, launch


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
    """Compute an RMSNorm in plain PyTorch: x (..., width) / sqrt(mean(x ** 2) + eps) * (weight + offset), in at least
    fp32; return it in `dtype`."""
    exact = torch.promote_types(x.dtype, torch.float32)
    weight = weight.to(exact)
    return F.rms_norm(x.to(exact), weight.shape, weight + offset if offset else weight, eps).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
    """Compute the RMSNorm x / sqrt(mean(x ** 2) + eps) * (weight + offset), in at least fp32, and return it in `dtype`.
    It is computed by `plain_rms_norm`, or on a CPU by a kernel if x is large enough."""
    if takes_kernel(x, weight, dtype):
        return RMSNorm.apply(x, weight, eps, offset, dtype)  # type: ignore[no-any-return]
    return plain_rms_norm(x, weight, eps, offset, dtype)


def takes_kernel(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the CPU kernel, not PyTorch, computes the RMSNorm of x with this weight, for a result in
    `dtype`."""
    return (
        weight.dtype in DTYPES
        and dtype in DTYPES
        and is_worth("rms_norm", x)
        and fits(weight, weight.dtype, x.size(-1))
        and weight.is_contiguous()
    )


class RMSNorm(torch.autograd.Function):
    """The autograd function of `rms_norm`: kernels compute the norm and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
        x, width, kernels = x.contiguous(), x.size(-1), emitter("fused")
        ctx.norm = kernels.Norm(width, DTYPES[x.dtype], DTYPES[weight.dtype], DTYPES[dtype], eps, offset)
        (y, target), (factors, of_rows) = buffer(x.shape, dtype), buffer((x.numel() // width,), torch.float32)
        launch(kernels.rms_norm(ctx.norm), target, of_rows, x, weight, items=len(factors))
        ctx.save_for_backward(x, weight, factors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, factors), of_x, of_weight, kernels = ctx.saved_tensors, None, None, emitter("fused")
        grad = grad.contiguous()
        outer = address(grad, getattr(torch, ctx.norm.out_dtype), *x.shape)
        if ctx.needs_input_grad[0]:
            of_x, target = buffer(x.shape, x.dtype)
            launch(kernels.rms_norm_gradient(ctx.norm), target, outer, x, weight, factors, items=len(factors))
        if ctx.needs_input_grad[1]:
            sums, target = buffer(weight.shape, torch.float32)
            kernel, items = kernels.rms_norm_weight_gradient(ctx.norm), kernels.column_items(len(weight))
            launch(kernel, target, outer, x, factors, len(factors), items=items)
            of_weight = sums.to(weight.dtype)
        return of_x, of_weight, None, None, None
