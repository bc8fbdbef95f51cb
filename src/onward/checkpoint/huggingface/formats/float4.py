"""Elements of four bits, E2M1, in groups: MXFP4 (OCP Microscaling Formats, version 1.0) and NVFP4.

Two elements follow each other in a byte, the low half first. Shapes: O outputs, I inputs.
"""

import torch
from torch import Tensor

from onward.checkpoint.huggingface.formats.parts import Config, Parts, is_float, refusal, whole
from onward.checkpoint.huggingface.formats.scaled import exponentials
from onward.checkpoint.weights import StoredTensor

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NUMBERS = torch.cat([MAGNITUDES, -MAGNITUDES])  # by code of four bits: sign, two bits of exponent, one of mantissa
PAIRS = torch.stack([NUMBERS.repeat(16), NUMBERS.repeat_interleave(16)], -1)  # by byte


def experts_mxfp4(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A tensor (experts, groups * 32, rows) of GPT-OSS, stored as `_blocks` (experts, rows, groups, 16) and exponents
    `_scales` (experts, rows, groups); transposed, since GPT-OSS computes x @ weight."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    if (blocks.dtype, scales.dtype) != ("U8", "U8") or len(scales.shape) != 3 or blocks.shape != [*scales.shape, 16]:
        raise refusal(name, blocks, scales, "MXFP4")
    experts, rows, groups = scales.shape

    def read(start: int, end: int) -> Tensor:
        numbers = PAIRS[blocks.rows(start, end).int()].flatten(-2)
        return torch.ldexp(numbers, scales.rows(start, end).int()[..., None] - 127).flatten(-2).mT

    return StoredTensor([experts, groups * 32, rows], "BF16", read)


def mxfp4(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A weight of compressed-tensors, stored as `weight_packed` (O, I / 2) and exponents `weight_scale` (O, I / 32)."""
    packed, scales = parts[".weight_packed"], parts[".weight_scale"]
    if packed.dtype != "U8" or scales.dtype != "U8" or not in_groups(packed, scales, 32):
        raise refusal(name, packed, scales, "MXFP4")

    def read(start: int, end: int) -> Tensor:
        return grouped(packed.rows(start, end), exponentials(scales.rows(start, end)))

    return StoredTensor([packed.shape[0], 2 * packed.shape[1]], "BF16", read)


def nvfp4(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A weight (O, I) stored as packed bytes (O, I / 2), fp8 scales `weight_scale` (O, I / 16), and one fp32 factor of
    the whole tensor: `weight_scale_2` in ModelOpt, or its inverse, `weight_global_scale`, in compressed-tensors."""
    packed, scales = parts.get(".weight_packed") or parts[".weight"], parts[".weight_scale"]
    inverse = parts.get(".weight_global_scale")
    factor = inverse or parts[".weight_scale_2"]
    one = factor.shape in ([], [1]) and is_float(factor)
    if packed.dtype != "U8" or scales.dtype != "F8_E4M3" or not one or not in_groups(packed, scales, 16):
        raise refusal(name, packed, scales, "NVFP4")

    def read(start: int, end: int) -> Tensor:
        number = whole(factor).float().view(())
        factors = scales.rows(start, end).float()
        return grouped(packed.rows(start, end), factors / number if inverse else factors * number)

    return StoredTensor([packed.shape[0], 2 * packed.shape[1]], "BF16", read)


def in_groups(packed: StoredTensor, scales: StoredTensor, size: int) -> bool:
    return (
        len(packed.shape) == 2
        and 2 * packed.shape[1] % size == 0
        and scales.shape
        == [
            packed.shape[0],
            2 * packed.shape[1] // size,
        ]
    )


def grouped(packed: Tensor, factors: Tensor) -> Tensor:
    """Convert bytes (O, I / 2) and the factors of groups (O, G) to numbers (O, I)."""
    numbers = PAIRS[packed.int()].flatten(1).unflatten(1, (factors.size(1), -1))
    return (numbers * factors[..., None]).flatten(1)
