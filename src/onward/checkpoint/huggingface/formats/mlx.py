"""Weights of MLX folders: integers of 2 to 8 bits times a scale, plus a bias, both for a group of inputs; or floats of
4 or 8 bits times a scale for a group (MXFP4, MXFP8, NVFP4).

Shapes: O outputs, I inputs, G groups of inputs with the same scale and bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.huggingface.formats.float4 import grouped
from onward.checkpoint.huggingface.formats.parts import Config, Parts, half, is_float, refusal
from onward.checkpoint.huggingface.formats.scaled import exponentials
from onward.checkpoint.weights import StoredTensor


def float8(octets: Tensor) -> Tensor:
    return octets.view(torch.float8_e4m3fn).float()


SIZES = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # default bits and group_size
SCALES: dict[str, Callable[[Tensor], Tensor]] = {"mxfp4": exponentials, "mxfp8": exponentials, "nvfp4": float8}


def matrix(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A matrix (O, I), in the `mode` of the config's table for this module or, without a table, of the config
    itself."""
    own = config.get(name.removesuffix(".weight"))
    table: Mapping[str, Any] = own if isinstance(own, Mapping) else config
    mode = table.get("mode", "affine")
    default = SIZES.get(mode, (0, 0)) if isinstance(mode, str) else (0, 0)
    bits, size = table.get("bits", default[0]), table.get("group_size", default[1])
    sized = isinstance(bits, int) and isinstance(size, int) and 2 <= bits <= 8 and size > 0
    if mode not in SIZES or not sized or (mode != "affine" and (bits, size) != default):
        raise UserError(
            f"config.json has a quantization with mode {mode!r}, bits {bits} and group_size {size}: Onward reads "
            "'affine' integers of MLX with 2 to 8 bits, 'mxfp4', 'mxfp8' and 'nvfp4', so get the weights in one "
            "of these"
        )
    weight, scales, biases = parts[".weight"], parts[".scales"], parts.get(".biases")
    outputs, groups = scales.shape if len(scales.shape) == 2 else (0, 0)
    if mode == "affine":
        fits = biases is not None and is_float(scales, biases) and biases.shape == scales.shape
    else:
        fits = biases is None and scales.dtype == "U8"
    words, rest = divmod(groups * size * bits, 32)
    if weight.dtype != "U32" or not fits or weight.shape != [outputs, words] or rest:
        raise refusal(name, weight, scales, f"a matrix of MLX in mode {mode} with {bits} bits in groups of {size}")
    return floats(weight, scales, mode) if biases is None else affine(weight, scales, biases, bits)


def octets(weight: StoredTensor, start: int, end: int) -> Tensor:
    return weight.rows(start, end).contiguous().view(torch.uint8)


def floats(weight: StoredTensor, scales: StoredTensor, mode: str) -> StoredTensor:
    """The weight (O, I) that is stored as `weight` (O, words), each row's elements packed into 32-bit words, lowest
    bits first: 4-bit E2M1 or 8-bit E4M3. Scales (O, G) are exponents, or E4M3 in NVFP4."""
    bits, size = SIZES[mode]

    def read(start: int, end: int) -> Tensor:
        elements, factors = octets(weight, start, end), SCALES[mode](scales.rows(start, end))
        return grouped(elements, factors) if bits == 4 else float8(elements) * factors.repeat_interleave(size, 1)

    return StoredTensor([scales.shape[0], scales.shape[1] * size], "BF16", read)


def affine(weight: StoredTensor, scales: StoredTensor, biases: StoredTensor, bits: int) -> StoredTensor:
    """The weight (O, I) that is stored as `weight` (O, words), each row's integers packed into 32-bit words, lowest
    bits first and across words, with scales and biases (O, G)."""
    inputs = weight.shape[1] * 32 // bits
    size = inputs // scales.shape[1]

    def integers(start: int, end: int) -> Tensor:
        """Integers (rows, I), unpacked from rows of bits."""
        single = octets(weight, start, end)[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
        places = 1 << torch.arange(bits)
        return (single.view(single.size(0), inputs, bits) * places).sum(-1)

    def read(start: int, end: int) -> Tensor:
        factors, shifts = (part.rows(start, end).float().repeat_interleave(size, 1) for part in (scales, biases))
        return integers(start, end) * factors + shifts

    return StoredTensor([scales.shape[0], inputs], half(scales), read)
