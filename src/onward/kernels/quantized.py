"""Products with quantized weights, and the dequantization of their codes and scales."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.kernels.linear import compiled, has_few_rows, run
from onward.kernels.memory import Unreadable, address

GROUP = 32  # int4 weights with the same scale
NOT_QUANTIZED = f"int4 needs a number of inputs that is a multiple of {GROUP}"
BLOCK = 512  # outputs that are dequantized at a time


def plain_quantized_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x (..., I) with a quantized weight (O, I), stored as int8 or packed int4 `codes` and floating-point
    `scales`, in plain PyTorch, and add a bias (O,); return (..., O)."""
    y = x.new_empty(*x.shape[:-1], len(codes))
    for start in range(0, len(codes), BLOCK):  # a block at a time stays in a CPU's cache
        rows = slice(start, start + BLOCK)
        y[..., rows] = F.linear(x, dequantize_weight(codes[rows], scales[rows], x.dtype))
    return y if bias is None else y.add_(bias)


def dequantize_weight(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (O, I) that int8 or int4 codes and their scales represent, in `dtype`."""
    groups = unpack(codes).float().unflatten(1, (1 if codes.dtype == torch.int8 else scales.size(1), -1))
    return (groups * scales.float().view(len(codes), -1, 1)).flatten(1).to(dtype)


def unpack(codes: Tensor) -> Tensor:
    """Unpack the int8 or int4 codes of a quantized weight to one integer per number of the weight, (O, I) in int8; int4
    codes are stored two in a byte."""
    if codes.dtype == torch.int8:
        return codes
    groups = codes.unflatten(1, (-1, GROUP // 2))
    return torch.cat([groups & 15, groups >> 4], 2).flatten(1).to(torch.int8) - 8


def quantized_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x (..., I) with a quantized weight, given by codes and scales, and add a bias (O,); return (..., O). The
    product is computed by `plain_quantized_linear`, or on a CPU by a kernel for few rows of x."""
    if has_few_rows(x):
        kernel = compiled("int8" if codes.dtype == torch.int8 else "int4", x.dtype, bias is not None)
        if kernel is not None:
            with suppress(Unreadable):
                return run(kernel, x, *addresses(codes, scales, x.size(-1)), bias, len(codes))
    return plain_quantized_linear(x, codes, scales, bias)


def addresses(codes: Tensor, scales: Tensor, inputs: int) -> tuple[int, int]:
    """Return the memory addresses of the codes and of the scales of a quantized weight (O, I), where I is `inputs`.
    Raises Unreadable if the kernel cannot read them."""
    outputs = len(codes)
    if codes.dtype == torch.int8:
        return address(codes, torch.int8, outputs, inputs), address(scales, torch.float32, outputs)
    groups = inputs // GROUP
    if inputs % GROUP:
        raise Unreadable(NOT_QUANTIZED)
    return address(codes, torch.uint8, outputs, groups * GROUP // 2), address(scales, torch.bfloat16, outputs, groups)


LIBRARY = torch.library.Library("onward", "DEF")  # an operation of its own is one record of a decoding step
LIBRARY.define("quantized_linear(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor")
LIBRARY.impl("quantized_linear", quantized_linear, "CompositeExplicitAutograd")
