"""The tensor types of GGUF: the numbers and the bytes per block, and functions that convert between them. A function
named after a type dequantizes blocks of it (N, bytes) to numbers (N, W) in fp32; a function with the prefix `to_`
quantizes numbers.

Source: ggml-common.h and ggml-quants.c of llama.cpp. Shapes: N blocks, W numbers in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onward.checkpoint.gguf.kquants import to_q4_k, to_q5_k, to_q6_k

Bytes = np.ndarray  # uint8 (N, bytes of a block)
Numbers = np.ndarray  # float32 (N, W)


@dataclass(frozen=True)
class BlockType:
    """A tensor type such as Q4_0: its elements and bytes per block. `plain` is the dtype of a type that is not
    quantized, in blocks of one element."""

    name: str
    numbers: int
    bytes: int
    plain: torch.dtype | None = None
    dequantize: Callable[[Bytes], Numbers] | None = None  # None: Onward cannot read this type
    quantize: Callable[..., Bytes] | None = None  # takes numbers and, for K types, their weights

    def decode(self, raw: np.ndarray) -> Tensor:
        """Convert the bytes of complete blocks to numbers (n,), in fp32 if the type is quantized."""
        if self.plain is not None:
            return torch.from_numpy(raw).view(self.plain)
        assert self.dequantize is not None
        with np.errstate(all="ignore"):  # non-finite numbers are detected where the tensor is used
            return torch.from_numpy(self.dequantize(raw.reshape(-1, self.bytes))).flatten()

    def encode(self, tensor: Tensor, columns: np.ndarray | None = None) -> np.ndarray:
        """Convert a tensor to bytes of this type, rounded as llama.cpp does; for K types, `columns` are weights of the
        squared errors."""
        if self.plain is not None:
            return tensor.to(self.plain).contiguous().view(-1).view(torch.uint8).numpy()
        assert self.quantize is not None
        numbers = tensor.float().reshape(-1, self.numbers).numpy()
        return self.quantize(numbers) if columns is None else self.quantize(numbers, columns.reshape(numbers.shape))


def half(b: Bytes, start: int = 0) -> Numbers:
    """The fp16 number in two bytes of each block, as fp32 (N, 1)."""
    return b[:, start : start + 2].view(np.float16).astype(np.float32)


def nibbles(b: Bytes) -> np.ndarray:
    """The low four bits of bytes (..., n), then their high four bits: (..., 2 n)."""
    return np.concatenate([b & 15, b >> 4], -1)


def fifth(b: Bytes) -> np.ndarray:
    """The fifth bits of the 32 numbers of each block, given as (N, 4) bytes, as 0 or 16: (N, 32)."""
    return ((b.view(np.uint32) >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8) << 4


def q8_0(b: Bytes) -> Numbers:
    return half(b) * b[:, 2:].view(np.int8).astype(np.float32)


def q4_0(b: Bytes) -> Numbers:
    return half(b) * (nibbles(b[:, 2:]).astype(np.float32) - 8)


def q4_1(b: Bytes) -> Numbers:
    return half(b) * nibbles(b[:, 4:]).astype(np.float32) + half(b, 2)


def q5_0(b: Bytes) -> Numbers:
    return half(b) * ((nibbles(b[:, 6:]) | fifth(b[:, 2:6])).astype(np.float32) - 16)


def q5_1(b: Bytes) -> Numbers:
    return half(b) * (nibbles(b[:, 8:]) | fifth(b[:, 4:8])).astype(np.float32) + half(b, 2)


def scales_and_minima(b: Bytes) -> tuple[Numbers, Numbers]:
    """Scale and minimum of each of the eight groups of 32 numbers in Q4_K or Q5_K blocks, (N, 8, 1) each."""
    s = b[:, 4:16]
    low, mid, high = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], 1).astype(np.float32)
    minima = np.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], 1).astype(np.float32)
    return (half(b) * scales)[..., None], (half(b, 2) * minima)[..., None]


def q4_k(b: Bytes) -> Numbers:
    scales, minima = scales_and_minima(b)
    codes = nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (scales * codes.astype(np.float32) - minima).reshape(len(b), -1)


def q5_k(b: Bytes) -> Numbers:
    scales, minima = scales_and_minima(b)
    codes = nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    bits = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return (scales * (codes | bits << 4).astype(np.float32) - minima).reshape(len(b), -1)


def q6_k(b: Bytes) -> Numbers:
    halves = b[:, :128].reshape(-1, 2, 64)
    low = np.stack([halves & 15, halves >> 4], 2).reshape(-1, 2, 4, 32)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = half(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[..., None] * codes).reshape(len(b), -1)


HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # the values of FP4, times 2


def mxfp4(b: Bytes) -> Numbers:
    return np.ldexp(HALVES[nibbles(b[:, 1:])], b[:, :1].astype(np.int32) - 128)


def over(x: Numbers, d: Numbers) -> Numbers:
    """x / d, by multiplication with the reciprocal, which rounds as llama.cpp does; 0 where d is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return x * np.where(d == 0, 0, 1 / d)


def to_q8_0(x: Numbers) -> Bytes:
    d = np.abs(x).max(1, keepdims=True) / np.float32(127)
    scaled = over(x, d)
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)  # ties away from zero
    return np.concatenate([d.astype(np.float16).view(np.uint8), codes.view(np.uint8)], 1)


def to_q4_0(x: Numbers) -> Bytes:
    d = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1) / np.float32(-8)
    scaled = over(x, d)
    codes = np.trunc(scaled + np.float32(8.5)).clip(0, 15).astype(np.uint8)
    return np.concatenate([d.astype(np.float16).view(np.uint8), codes[:, :16] | codes[:, 16:] << 4], 1)


UNREAD = {  # by id: names of the types that Onward does not read, with their numbers and bytes per block
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
}
TYPES = {
    0: BlockType("F32", 1, 4, torch.float32),
    1: BlockType("F16", 1, 2, torch.float16),
    2: BlockType("Q4_0", 32, 18, None, q4_0, to_q4_0),
    3: BlockType("Q4_1", 32, 20, None, q4_1),
    6: BlockType("Q5_0", 32, 22, None, q5_0),
    7: BlockType("Q5_1", 32, 24, None, q5_1),
    8: BlockType("Q8_0", 32, 34, None, q8_0, to_q8_0),
    12: BlockType("Q4_K", 256, 144, None, q4_k, to_q4_k),
    13: BlockType("Q5_K", 256, 176, None, q5_k, to_q5_k),
    14: BlockType("Q6_K", 256, 210, None, q6_k, to_q6_k),
    28: BlockType("F64", 1, 8, torch.float64),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
    39: BlockType("MXFP4", 32, 17, None, mxfp4),
    **{code: BlockType(*sizes) for code, sizes in UNREAD.items()},
}
CODES = {kind.name: code for code, kind in TYPES.items()}
