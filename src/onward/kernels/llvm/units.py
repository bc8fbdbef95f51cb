"""The arithmetic units of products: the multiply-add instructions of a CPU and the vectors that they take, and sums of
vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llvmlite import ir

from onward.kernels.llvm.code import FLOATS, LANES, Code
from onward.kernels.llvm.compiler import host_features

PAIRS = 2 * LANES
ZERO = ir.Constant(FLOATS, [0.0] * LANES)


class BFloat(ir.Type):
    """LLVM's type bfloat (bf16) for llvmlite, which lacks it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class Unit:
    """The fp32 multiply-add instructions of a CPU, for vectors of LANES numbers; its methods emit code. `step` is the
    number of elements that one vector holds."""

    dtype, step, vector = "float32", LANES, FLOATS

    def read(self, code: Code, address: Any, dtype: str, index: Any, left: Any = None) -> Any:
        """Emit code that reads `step` numbers in `dtype` from `index` on; with `left`, only the first `left` are read,
        and the others are zeros."""
        return code.as_floats(code.vector(address, dtype, index, self.step, left), dtype)

    def add(self, code: Code, a: Any, b: Any, total: Any) -> Any:
        """Emit code that adds the elementwise products of the vectors a and b to `total`, a vector of LANES partial
        sums."""
        return code.fma(a, b, total)


class DotUnit(Unit):
    """The bf16 multiply-add instructions of a CPU, for vectors of 2 * LANES numbers, whose products are added to fp32
    sums in pairs. A subclass for each instruction set emits `add`."""

    dtype, step, vector = "bfloat16", PAIRS, ir.VectorType(BFloat(), PAIRS)

    def read(self, code: Code, address: Any, dtype: str, index: Any, left: Any = None) -> Any:
        numbers = code.vector(address, dtype, index, self.step, left)
        if dtype == "int8":  # bf16, the upper half of fp32, represents every int8 exactly
            halves = code.bitcast(code.as_floats(numbers, dtype), ir.VectorType(ir.IntType(16), 2 * PAIRS))
            numbers = shuffle(code, range(1, 2 * PAIRS, 2), halves)
        return code.bitcast(numbers, self.vector)

    def of_floats(self, code: Code, low: Any, high: Any) -> Any:
        """Emit code that converts two vectors of LANES fp32 numbers, `low` and `high`, to one of bf16."""
        return code.fptrunc(shuffle(code, range(PAIRS), low, high), self.vector)


class AVX512DotUnit(DotUnit):
    """The bf16 multiply-add instructions of x86-64 (AVX512-BF16)."""

    def add(self, code: Code, a: Any, b: Any, total: Any) -> Any:
        return code.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, a, b])


class NeonDotUnit(DotUnit):
    """The bf16 multiply-add instructions of ARM (BFDOT), for registers of 8 bf16 and 4 fp32 numbers."""

    def add(self, code: Code, a: Any, b: Any, total: Any) -> Any:
        quarters = []
        for start in range(0, LANES, LANES // 4):
            part = shuffle(code, range(start, start + LANES // 4), total)
            factors = [shuffle(code, range(2 * start, 2 * start + PAIRS // 4), vector) for vector in (a, b)]
            quarters.append(code.intrinsic("llvm.aarch64.neon.bfdot.v4f32.v8bf16", part.type, [part, *factors]))
        halves = [shuffle(code, range(LANES // 2), *quarters[i : i + 2]) for i in (0, 2)]
        return shuffle(code, range(LANES), *halves)


DOT_UNITS = {"avx512bf16": AVX512DotUnit, "bf16": NeonDotUnit}  # by LLVM's name of the CPU feature


def unit_for(dtype: str, features: Mapping[str, bool] | None = None) -> Unit:
    """Return the fastest multiply-add instructions for x in `dtype` on a CPU with these `features` (None: on this
    CPU)."""
    features = host_features() if features is None else features
    units = [unit for feature, unit in DOT_UNITS.items() if features.get(feature)] if dtype == "bfloat16" else []
    return units[0]() if units else Unit()


def sums(code: Code, vectors: Sequence[Any]) -> Any:
    """Emit code that adds up each of up to LANES vectors of LANES numbers; return the sums as the first numbers of a
    vector.

    Each sum is computed in the same order, regardless of the number of vectors: number i and i + 8 first, then i + 4,
    ...
    """
    count, step = 1 << (len(vectors) - 1).bit_length(), LANES // 2
    padded = [*vectors, *[vectors[-1]] * (count - len(vectors))]
    order = [0]  # lane of each vector's sum
    while step:
        starts = range(0, LANES, 2 * step)
        if len(padded) > 1:
            half = len(padded) // 2
            low = [start + i + other for start in starts for other in (0, LANES) for i in range(step)]
            pairs = zip(padded[:half], padded[half:])
            padded = [
                code.fadd(shuffle(code, low, a, b), shuffle(code, [i + step for i in low], a, b)) for a, b in pairs
            ]
            order = [place + more for place in order for more in (0, step)]
        else:
            padded = [code.fadd(padded[0], shuffle(code, [i ^ step for i in range(LANES)], padded[0]))]
        step //= 2
    return padded[0] if count == 1 else shuffle(code, (order * LANES)[:LANES], padded[0])


def shuffle(code: Code, indices: Sequence[int], a: Any, b: Any = None) -> Any:
    """Emit code for a vector of the numbers at `indices` of the vectors a and b concatenated."""
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), list(indices))
    return code.shuffle_vector(a, ir.Constant(a.type, ir.Undefined) if b is None else b, lanes)
