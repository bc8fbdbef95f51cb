"""Norms, rotations and gates of long prompts: one kernel each, instead of five to nine operations of PyTorch.

On a CPU and without gradients (`linear.takes_kernels`). A kernel is compiled, in some 50 ms, once PyTorch has computed
about as many numbers as it would in that time, so that short work never waits for it.
Shapes: B batch, T tokens, H heads, E d_head, N = B T.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onward.model.config import Activation
from onward.model.linear import MIN_PARALLEL, compiled, takes_kernels

COMPILED_AFTER = 1 << 24  # numbers
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
counted = Counter[str]()  # the numbers that PyTorch has computed, by the name of the kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor | None:
    """The norm of x (..., width) in its dtype, by a kernel; None where PyTorch is to compute it."""
    if not worth("rms_norm", x) or weight.dtype not in DTYPES:
        return None
    kernel = kernels().rms_norm(x.size(-1), DTYPES[x.dtype], DTYPES[weight.dtype], eps, offset)
    return run(kernel, x.contiguous(), weight, items=x.numel() // x.size(-1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """x (B, T, H, E) rotated by angles (B, T, 1, half), by a kernel; None where PyTorch is to do it."""
    half = cos.size(-1)
    if not worth("rotation", x) or cos.shape != (*x.shape[:2], 1, half) or cos.dtype != torch.float32:
        return None
    kernel = kernels().rotation(x.size(2), x.size(3), half, DTYPES[x.dtype])
    return run(kernel, x.contiguous(), cos.contiguous(), sin.contiguous(), items=cos.numel() // half)


def gate(x: Tensor, y: Tensor, activation: Activation) -> Tensor | None:
    """activation(x) * y, both contiguous and of one shape, by a kernel; None where PyTorch is to compute it."""
    if not worth("gate", x) or x.shape != y.shape or not (x.is_contiguous() and y.is_contiguous()):
        return None
    return run(kernels().gate(activation, DTYPES[x.dtype]), x, y, items=x.numel())


def worth(name: str, x: Tensor) -> bool:
    """Whether a kernel is to compute the result for x: there is much of it, now and before."""
    if x.numel() < MIN_PARALLEL or x.dtype not in DTYPES or not takes_kernels(x):
        return False
    if counted[name] < COMPILED_AFTER:
        counted[name] += x.numel()
        return False
    return compiled(DTYPES[x.dtype], x.dtype, False) is not None  # what compiles products compiles these


def run(kernel: Callable[..., None], x: Tensor, *others: Tensor, items: int) -> Tensor:
    """Call a kernel that writes a tensor like x."""
    y = torch.empty_like(x)
    kernel(*(tensor.data_ptr() for tensor in (y, x, *others)), items, torch.get_num_threads())
    return y


def kernels() -> Any:
    """The module of the kernels, which imports the compiler."""
    from onward.model.kernels import fused

    return fused
