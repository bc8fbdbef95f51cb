"""Products with a quantized weight, by a CPU kernel for few rows, else in plain PyTorch.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from onward.kernels.memory import Unreadable, multiply
from onward.kernels.operations import has_few_rows, product_kernel
from onward.kernels.quantized import plain_quantized_linear, weight_addresses


def quantized_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x (..., I) with a quantized weight (O, I) and add a bias (O,); return (..., O)."""
    weight_format = "int8" if codes.dtype == torch.int8 else "int4"
    if has_few_rows(x, weight_format):
        kernel = product_kernel(weight_format, x.dtype, bias is not None)
        if kernel is not None:
            with suppress(Unreadable):
                return multiply(kernel, x, *weight_addresses(codes, scales, x.size(-1)), bias, len(codes))
    return plain_quantized_linear(x, codes, scales, bias)


LIBRARY = torch.library.Library("onward", "FRAGMENT")  # a recorded decoding step has the product as one operation
LIBRARY.define("quantized_linear(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor")
LIBRARY.impl("quantized_linear", quantized_linear, "CompositeExplicitAutograd")
