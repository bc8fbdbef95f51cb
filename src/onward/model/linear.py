"""The products of the model with its weights: `linear` chooses a kernel by the number of rows, dtype and device.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from onward.kernels.available import unavailable
from onward.kernels.memory import Unreadable, address, buffer

MIN_PARALLEL = 1 << 16  # elements of a weight from which several threads are faster than one


class Linear(nn.Linear):
    """x Wᵀ + bias: (..., I) -> (..., O)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I) times a weight (O, I), plus a bias (O,): (..., O).

    Up to `max_rows` rows on a CPU are computed by a kernel (`kernels/products.py`), which for a few rows reads the
    weight at the speed of the memory; all others, and whatever needs gradients, by `torch.nn.functional.linear`.
    """
    kernel = kernel_for(x, weight, bias)
    if kernel is not None:
        with suppress(Unreadable):
            outputs = len(weight)
            pointer = address(weight, x.dtype, outputs, x.size(-1))
            return run(kernel, x, pointer, pointer, bias, outputs)
    return F.linear(x, weight, bias)


def kernel_for(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., None] | None:
    """The kernel for x (..., I) and a plain weight, or None where PyTorch computes the product."""
    dtype = x.dtype
    if dtype is not weight.dtype or not weight.dim() or not fits(x):
        return None
    return compiled("float32" if dtype is torch.float32 else "bfloat16", dtype, bias is not None)


@cache
def max_rows(dtype: torch.dtype) -> int:
    """The most rows of a plain weight that a kernel multiplies as fast as PyTorch; none in dtypes without a kernel."""
    cpu = torch.cpu.get_capabilities()
    if dtype == torch.bfloat16 and cpu.get("avx512_bf16"):
        return 32 if cpu.get("amx_tile") else 1 << 62
    return {torch.float32: 32, torch.bfloat16: 4}.get(dtype, 0)


def fits(x: Tensor) -> bool:
    """Whether a kernel may multiply x (..., I), and it has at most `max_rows` rows."""
    return takes_kernels(x) and x.dim() > 0 and 0 < x.numel() <= max_rows(x.dtype) * x.size(-1)


def takes_kernels(x: Tensor) -> bool:
    """Whether a kernel may read x, and no gradient or dtype of autocast is asked for."""
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and kernels_can_read(x)


def kernels_can_read(x: Tensor) -> bool:
    """Whether x is a tensor in the memory of a CPU, with its numbers as they are, and no operation of PyTorch is
    watched."""
    return type(x) is Tensor and torch._C._dispatch_keys(x).raw_repr() in plain_keys() and not is_watched()


def is_watched() -> bool:
    """Whether something sees, records, transforms or differentiates the operations of PyTorch now. Kernels and
    compiled steps are none of these operations."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()  # such as a counter of FLOPs, or fake tensors
        or torch._C._len_torch_function_stack()  # such as torch.set_default_device
        or torch._C._is_tracing()  # torch.jit.trace
        or torch._C._functorch.peek_interpreter_stack() is not None  # vmap, grad, jvp, functionalize
        or forward_ad._current_level >= 0
    )


@cache
def plain_keys() -> frozenset[int]:
    """The dispatch keys of plain dense tensors in the memory of a CPU: without those of subclasses, sparse and nested
    layouts, wrappers of transforms, and the flags of lazy negation and zeros."""
    with torch.inference_mode(False):
        keys = [torch._C._dispatch_keys(torch.empty(0, device="cpu", dtype=torch.float32)).raw_repr()]
    with torch.inference_mode():
        keys.append(torch._C._dispatch_keys(torch.empty(0, device="cpu", dtype=torch.float32)).raw_repr())
    return frozenset(keys)


def run(kernel: Callable[..., None], x: Tensor, weight: int, scales: int, bias: Tensor | None, outputs: int) -> Tensor:
    """Call a kernel of `kernels/products.py`; `weight` and `scales` are addresses. Raises Unreadable."""
    x, inputs, dtype = x.contiguous(), x.size(-1), x.dtype
    y, target = buffer((*x.shape[:-1], outputs), dtype)
    threads = torch.get_num_threads() if outputs * inputs >= MIN_PARALLEL else 1
    operands = address(x, dtype, *x.shape), weight, scales, address(bias, dtype, outputs), target
    kernel(*operands, x.numel() // inputs, outputs, inputs, outputs, threads)
    return y


@cache
def compiled(weight_format: str, dtype: torch.dtype, biased: bool) -> Callable[..., None] | None:
    """The kernel for weights of a format and x of a dtype; None, with a warning, where nothing can be compiled."""
    if unavailable():
        return None
    from onward.kernels.llvm.products import products

    return products(weight_format, str(dtype).removeprefix("torch."), biased)
