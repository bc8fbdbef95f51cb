"""Products of activations with weights. For few rows a kernel reads the weight at the speed of the memory.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.kernels.available import unavailable
from onward.kernels.memory import Unreadable, address, buffer
from onward.kernels.rules import DTYPES, MIN_PARALLEL, emitter, takes_kernels

ANY = 1 << 62  # rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x (..., I) with a weight (O, I) and add a bias (O,); return (..., O).

    On a CPU a kernel computes up to `max_rows` rows; all others, and products that need gradients, go to
    `torch.nn.functional.linear`.
    """
    kernel = kernel_for(x, weight, bias)
    if kernel is not None:
        with suppress(Unreadable):
            outputs = len(weight)
            pointer = address(weight, x.dtype, outputs, x.size(-1))
            return run(kernel, x, pointer, pointer, bias, outputs)
    return F.linear(x, weight, bias)


def kernel_for(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., None] | None:
    """Return the CPU kernel that multiplies x (..., I) with an unquantized weight (O, I) and adds the bias, if any;
    None if PyTorch computes the product."""
    if x.dtype is not weight.dtype or not weight.dim() or not has_few_rows(x):
        return None
    return compiled(DTYPES[x.dtype], x.dtype, bias is not None)


@cache
def max_rows(dtype: torch.dtype) -> int:
    """Return the most rows of x for which the CPU kernel for unquantized weights is at least as fast as PyTorch; 0 in
    dtypes without a kernel."""
    cpu = torch.cpu.get_capabilities()
    if dtype == torch.bfloat16 and cpu.get("avx512_bf16"):
        return 32 if cpu.get("amx_tile") else ANY
    if dtype == torch.float32 and cpu.get("avx512_f") and str(cpu.get("cpu_name", "")).startswith("AMD"):
        return ANY  # PyTorch's library (MKL) computes with half of the vectors' width there
    return {torch.float32: 32, torch.bfloat16: 4}.get(dtype, 0)


def has_few_rows(x: Tensor) -> bool:
    """Return whether a CPU kernel may multiply x (..., I) with a weight: the kernel can read x, and x has at most
    `max_rows` rows (vectors of size I)."""
    return takes_kernels(x) and x.dim() > 0 and 0 < x.numel() <= max_rows(x.dtype) * x.size(-1)


def run(kernel: Callable[..., None], x: Tensor, weight: int, scales: int, bias: Tensor | None, outputs: int) -> Tensor:
    """Call a compiled kernel that multiplies x (..., I) with a weight, and return the result (..., outputs). `weight`
    and `scales` are the memory addresses of the weight and of its quantization scales, the latter ignored for an
    unquantized weight. Raises Unreadable if the kernel cannot read x or the bias."""
    x, inputs, dtype = x.contiguous(), x.size(-1), x.dtype
    y, target = buffer((*x.shape[:-1], outputs), dtype)
    threads = torch.get_num_threads() if outputs * inputs >= MIN_PARALLEL else 1
    operands = address(x, dtype, *x.shape), weight, scales, address(bias, dtype, outputs), target
    kernel(*operands, x.numel() // inputs, outputs, inputs, outputs, threads)
    return y


@cache
def compiled(weight_format: str, dtype: torch.dtype, biased: bool) -> Callable[..., None] | None:
    """Compile the kernel that multiplies x in `dtype` with a weight in `weight_format` (float32, bfloat16, int8 or
    int4) and adds a bias if `biased`; None, with a warning, if this machine cannot compile it."""
    if unavailable():
        return None
    return emitter("products").products(weight_format, DTYPES[dtype], biased)  # type: ignore[no-any-return]
