"""The products of the model with its weights: `linear` chooses a kernel by the number of rows, dtype and device.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MAX_ROWS = {torch.float32: 32, torch.bfloat16: 4}  # up to this many rows, reading the weight takes most of the time
MIN_PARALLEL = 1 << 16  # elements of a weight from which several threads are faster than one


class Linear(nn.Linear):
    """x Wᵀ + bias: (..., I) -> (..., O)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I) times a weight (O, I), plus a bias (O,): (..., O).

    A few rows on a CPU, as in decoding, are computed by a kernel that reads the weight at the speed of the memory
    (`kernels/products.py`); all others, and whatever needs gradients, by `torch.nn.functional.linear`.
    """
    kernel = few_rows_kernel(x, weight, bias)
    if kernel is None:
        return F.linear(x, weight, bias)
    return run(kernel, x, weight, weight, bias, weight.size(0))


def few_rows_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., None] | None:
    """The kernel for x (..., I) and a plain weight, or None where PyTorch computes the product."""
    dtype = x.dtype
    if dtype not in MAX_ROWS or dtype is not weight.dtype or not fits(x, weight, MAX_ROWS[dtype]):
        return None
    return compiled("float32" if dtype is torch.float32 else "bfloat16", dtype, bias is not None)


def fits(x: Tensor, weight: Tensor, max_rows: int) -> bool:
    """Whether x (..., I) has at most `max_rows` rows in the memory of a CPU, and nothing watches or differentiates the
    operations of PyTorch."""
    return (
        not torch.is_grad_enabled()
        and x.is_cpu
        and weight.is_cpu
        and 0 < x.numel() <= max_rows * x.size(-1)
        and type(x) is Tensor
        and weight.is_contiguous()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_dispatch_stack()  # such as a counter of FLOPs
    )


def run(
    kernel: Callable[..., None], x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, outputs: int
) -> Tensor:
    """Call a kernel of `kernels/products.py`."""
    x, inputs = x.contiguous(), x.size(-1)
    y = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype)
    threads = torch.get_num_threads() if outputs * inputs >= MIN_PARALLEL else 1
    bias_address = 0 if bias is None else bias.data_ptr()
    addresses = x.data_ptr(), weight.data_ptr(), scales.data_ptr(), bias_address, y.data_ptr()
    kernel(*addresses, x.numel() // inputs, outputs, inputs, outputs, threads)
    return y


@cache
def compiled(weight_format: str, dtype: torch.dtype, biased: bool) -> Callable[..., None] | None:
    """The kernel for weights of a format and x of a dtype; None, with a warning, where it cannot be compiled."""
    try:
        from onward.model.kernels.products import products

        return products(weight_format, str(dtype).removeprefix("torch."), biased)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        warnings.warn(f"decoding is slower here, since its kernels cannot be compiled: {error}", stacklevel=2)
        return None
