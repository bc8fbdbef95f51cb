"""Dequantizes published quantized formats while they are read.

MXFP4 (GPT-OSS; OCP Microscaling Formats, version 1.0) and the fp8 of DeepSeek-V3 (arXiv:2412.19437, section 3.3); the
integers of compressed-tensors are in `packed.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.packed import packed_integers, refusal
from onward.checkpoint.weights import FLOATS, StoredTensor
from onward.families import HF


def dequantized(hf: HF, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored tensors with each quantized weight as one tensor that is dequantized when read."""
    config = hf.get("quantization_config")
    if config is None:
        return stored
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(
            f"config.json has a quantization_config with quant_method {method!r}: Onward reads "
            f"{', '.join(METHODS)}, so get the weights in a format that is not quantized"
        )
    endings, read = METHODS[method]
    left = dict(stored)
    for name in stored:
        base = name.removesuffix(endings[0])
        if base + endings[0] == name and all(base + ending in left for ending in endings):
            parts = [left.pop(base + ending) for ending in endings]
            left[base] = read(base, *parts, config)
    return left


def mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor, config: Mapping[str, Any]) -> StoredTensor:
    """A tensor (experts, groups * 32, rows) of GPT-OSS, stored as `blocks` (experts, rows, groups, 16), two elements
    per byte, and exponents `scales` (experts, rows, groups); transposed, since GPT-OSS computes x @ weight."""
    if (blocks.dtype, scales.dtype) != ("U8", "U8") or len(scales.shape) != 3 or blocks.shape != [*scales.shape, 16]:
        raise refusal(name, blocks, scales, "MXFP4")
    experts, rows, groups = scales.shape

    def read(start: int, end: int) -> Tensor:
        numbers = PAIRS[blocks.rows(start, end).int()].flatten(-2)
        return torch.ldexp(numbers, scales.rows(start, end).int()[..., None] - 127).flatten(-2).mT

    return StoredTensor([experts, groups * 32, rows], "BF16", read)


MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NUMBERS = torch.cat([MAGNITUDES, -MAGNITUDES])  # by code of four bits: sign, two bits of exponent, one of mantissa
PAIRS = torch.stack([NUMBERS.repeat(16), NUMBERS.repeat_interleave(16)], -1)  # by byte, the low half first


def fp8(name: str, weight: StoredTensor, scales: StoredTensor, config: Mapping[str, Any]) -> StoredTensor:
    """A matrix stored in float8_e4m3fn with one scale per block of elements; blocks at the edges may be smaller."""
    match config.get("weight_block_size", [128, 128]):
        case [int(height), int(width)] if height > 0 < width:
            pass
        case other:
            raise UserError(f"config.json has weight_block_size {other}: Onward reads fp8 in blocks of two sizes")
    grid = [-(-n // size) for n, size in zip(weight.shape, (height, width))]
    if weight.dtype != "F8_E4M3" or scales.dtype not in FLOATS or len(weight.shape) != 2 or scales.shape != grid:
        raise refusal(name, weight, scales, f"fp8 in blocks of {height} by {width}")

    def read(start: int, end: int) -> Tensor:
        factors = scales.rows(start // height, -(-end // height)).float()
        rows = factors.repeat_interleave(height, 0)[start % height :][: end - start]
        return weight.rows(start, end).float() * rows.repeat_interleave(width, 1)[:, : weight.shape[1]]

    return StoredTensor(weight.shape, "BF16", read)


METHODS: dict[str, tuple[Sequence[str], Callable[..., StoredTensor]]] = {  # the endings of a weight's tensors
    "mxfp4": (("_blocks", "_scales"), mxfp4),
    "fp8": (("", "_scale_inv"), fp8),
    "compressed-tensors": (("_packed", "_scale", "_shape"), packed_integers),
}
