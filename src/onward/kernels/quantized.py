"""Quantized weights: int8 or int4 codes and their scales, in plain PyTorch.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.kernels.memory import Unreadable, address

GROUP = 32  # int4 weights with the same scale
NOT_QUANTIZED = f"int4 needs a number of inputs that is a multiple of {GROUP}"
BLOCK = 512  # outputs that are dequantized at a time


def plain_quantized_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x (..., I) with a quantized weight (O, I) and add a bias (O,); return (..., O)."""
    y = x.new_empty(*x.shape[:-1], len(codes))
    for start in range(0, len(codes), BLOCK):  # a block at a time stays in a CPU's cache
        rows = slice(start, start + BLOCK)
        y[..., rows] = F.linear(x, dequantize_weight(codes[rows], scales[rows], x.dtype))
    return y if bias is None else y.add_(bias)


def dequantize_weight(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight (O, I) that int8 or int4 codes and their scales represent."""
    groups = unpack(codes).float().unflatten(1, (1 if codes.dtype == torch.int8 else scales.size(1), -1))
    return (groups * scales.float().view(len(codes), -1, 1)).flatten(1).to(dtype)


def unpack(codes: Tensor) -> Tensor:
    """The codes of a quantized weight as (O, I) in int8; int4 codes are stored two in a byte."""
    if codes.dtype == torch.int8:
        return codes
    groups = codes.unflatten(1, (-1, GROUP // 2))
    return torch.cat([groups & 15, groups >> 4], 2).flatten(1).to(torch.int8) - 8


def weight_addresses(codes: Tensor, scales: Tensor, inputs: int) -> tuple[int, int]:
    """The memory addresses of the codes and of the scales of a quantized weight (O, I), where I is `inputs`. Raises
    Unreadable if the kernel cannot read them."""
    outputs = len(codes)
    if codes.dtype == torch.int8:
        return address(codes, torch.int8, outputs, inputs), address(scales, torch.float32, outputs)
    groups = inputs // GROUP
    if inputs % GROUP:
        raise Unreadable(NOT_QUANTIZED)
    return address(codes, torch.uint8, outputs, groups * GROUP // 2), address(scales, torch.bfloat16, outputs, groups)
