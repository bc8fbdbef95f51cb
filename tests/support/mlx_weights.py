"""Random weights as MLX stores them, and helpers for other formats.

Shapes: O outputs, I inputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Stored = dict[str, Tensor]  # tensors of a layer, by the suffix of their names
# config, and a function from (O, I) to stored tensors and expected values
Case = tuple[dict[str, Any], Callable[[int, int], tuple[Stored, Tensor]]]


def integers(least: int, end: int, *shape: int) -> Tensor:
    return torch.randint(least, end, shape)


def nvfp4_in_fp64(packed: Tensor, scales: Tensor, factor: Tensor) -> Tensor:
    """Dequantize by the definition of E2M1, with the low nibble of a byte first."""
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(1).double()
    sign, exponent, mantissa = 1 - 2 * (codes // 8), codes // 2 % 4, codes % 2
    numbers = sign * torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2 ** (exponent - 1))
    return numbers * scales.double().repeat_interleave(16, 1) / factor.double()


def mlx(bits: int, size: int, **other: Any) -> Case:
    def make(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
        groups = inputs // size
        codes, (scales, biases) = integers(0, 1 << bits, outputs, inputs), torch.randn(2, outputs, groups).half()
        stream = (codes[..., None] >> torch.arange(bits) & 1).flatten(1).unflatten(1, (-1, 32))  # bits of each row
        words = (stream << torch.arange(32)).sum(-1).to(torch.uint32)
        spread = lambda t: t.double().repeat_interleave(size, 1)
        return {".weight": words, ".scales": scales, ".biases": biases}, codes * spread(scales) + spread(biases)

    return {"group_size": size, "bits": bits, **other}, make


def mlx_floats(mode: str) -> Case:
    """Weights in MLX's formats of floating-point elements: elements in 32-bit words, scales in bytes."""
    size = 16 if mode == "nvfp4" else 32

    def make(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
        elements = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        scales = integers(110, 130, outputs, inputs // size).to(torch.uint8)
        factors = 2.0 ** (scales.double() - 127)
        if mode == "nvfp4":
            factors = (torch.rand(scales.shape) * 400).to(torch.float8_e4m3fn)
            scales = factors.view(torch.uint8)
        if mode == "mxfp8":
            meant = elements.double() * factors.repeat_interleave(size, 1)
            return {".weight": elements.view(torch.uint32), ".scales": scales}, meant
        octets = integers(0, 256, outputs, inputs // 2).to(torch.uint8)
        one = torch.ones(())
        meant = nvfp4_in_fp64(octets, factors.double().repeat_interleave(size // 16, 1), one)
        return {".weight": octets.view(torch.uint32), ".scales": scales}, meant

    return {"group_size": size, "bits": 8 if mode == "mxfp8" else 4, "mode": mode}, make
