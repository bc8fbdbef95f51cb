"""Code of products with int4 weights. A byte has two weights, each plus 8: the low bits are from the first half of a
GROUP, the high bits from its second half. Each group has a bf16 scale.

Shapes: N rows, I inputs, O outputs; x (N, I), codes (O, I / 2), scales (O, I / 32).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from onward.kernels.llvm.code import FLOATS, INT, INTS, LANES, Code, integers
from onward.kernels.llvm.units import PAIRS, ZERO, AVX512DotUnit, BFloat, DotUnit, Unit, shuffle

GROUP = 32  # weights with the same scale
WIDE = 4 * GROUP  # weights in 64 bytes
WORDS = ir.VectorType(ir.IntType(16), PAIRS)
HALF, HALF_WORDS = ir.VectorType(BFloat(), LANES), ir.VectorType(ir.IntType(16), LANES)
NUMBERS = [struct.unpack("<I", struct.pack("<f", n))[0] >> 16 for n in range(-8, 8)]  # the value of each code, in bf16
SCALES = [place for lane in range(LANES) for place in (4, lane // 4)]  # zero and bf16 scale form an fp32 number


class Prepared(NamedTuple):
    """A copy of x, the activations, with its numbers in the order in which `dot` reads them."""

    address: Any
    stride: Any  # numbers per row


def halves(code: Code, codes: Any, place: Any) -> tuple[Any, Any]:
    """Emit code that reads the int4 codes of one quantization group of a weight; `codes` is the address of the codes,
    `place` the index of the group's first number in the weight. Return the two halves of the group, as fp32 numbers
    from 0 to 15."""
    bits = code.bytes(codes, code.lshr(place, INT(1)))
    low, high = code.and_(bits, integers(15)), code.lshr(bits, integers(4))
    return code.uitofp(low, FLOATS), code.uitofp(high, FLOATS)


def unpack(code: Code, unit: Unit, codes: Any, scales: Any, place: Any) -> Any:
    """Emit code that dequantizes the int4 weights of one vector of the unit, from weight index `place` on: a group or
    half of one."""
    scale = code.repeat(code.scalar(scales, "bfloat16", code.lshr(place, INT(5))))
    if isinstance(unit, AVX512DotUnit):  # a look-up in a table of 16 numbers takes half the time
        numbers = code.fptrunc(code.fmul(scale, ir.Constant(FLOATS, [float(n) for n in range(-8, 8)])), HALF)
        table = code.bitcast(shuffle(code, [*range(LANES)] * 2, numbers), WORDS)
        low = code.zext(code.vector(codes, "int8", code.lshr(place, INT(1)), LANES), HALF_WORDS)
        high = code.lshr(low, ir.Constant(HALF_WORDS, [4] * LANES))
        indices = shuffle(code, range(PAIRS), low, high)
        found = code.intrinsic("llvm.x86.avx512.permvar.hi.512", WORDS, [table, indices])
        return code.bitcast(found, unit.vector)
    offset = code.fmul(scale, ir.Constant(FLOATS, [-8.0] * LANES))
    half = code.and_(place, INT(LANES))
    pair = [code.fma(each, scale, offset) for each in halves(code, codes, code.sub(place, half))]
    if isinstance(unit, DotUnit):
        return unit.of_floats(code, *pair)
    return code.select(code.icmp_signed("==", half, INT(0)), *pair)


def unpack_groups(code: Code, codes: Any, scales: Any, place: Any) -> list[Any]:
    """Emit code that dequantizes the int4 weights of two groups from weight index `place` on, with AVX512-BF16. Return
    their first halves in one vector of bf16, as words, and their second halves in another."""
    pair = code.bitcast(code.repeat(code.scalar(scales, "float32", code.lshr(place, INT(6)))), INTS)
    each = code.shl(pair, integers(16)), code.and_(pair, integers(0xFFFF0000))
    codes_of_table = ir.Constant(FLOATS, [float(n) for n in range(-8, 8)])
    tables = [code.fmul(code.bitcast(scale, FLOATS), codes_of_table) for scale in each]
    kind = ir.VectorType(BFloat(), PAIRS)
    table = code.bitcast(code.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, tables[::-1]), WORDS)
    words = code.zext(code.vector(codes, "int8", code.lshr(place, INT(1)), PAIRS), WORDS)
    # the second group's values are in the second half of the table
    second = ir.Constant(WORDS, [0] * LANES + [LANES] * LANES)
    low = code.or_(code.and_(words, ir.Constant(WORDS, [15] * PAIRS)), second)
    high = code.or_(code.lshr(words, ir.Constant(WORDS, [4] * PAIRS)), second)
    return [code.intrinsic("llvm.x86.avx512.permvar.hi.512", WORDS, [table, indices]) for indices in (low, high)]


def unit_of(unit: Unit) -> Unit:
    """Return the instructions for `prepare` and `dot` on a CPU whose products use `unit`: bf16 only with the table
    look-ups of AVX-512."""
    return unit if isinstance(unit, AVX512DotUnit) else Unit()


def prepare(code: Code, unit: Unit, x: Any, dtype: str, rows: Any, inputs: Any) -> Prepared:
    """Emit code that copies x (`rows`, `inputs`) in the order in which `dot` reads it. Each thread makes its own
    copy."""
    wide = isinstance(unit, AVX512DotUnit)
    step, width = (WIDE, WIDE) if wide else (GROUP, GROUP + LANES)
    stride = code.mul(code.udiv(code.add(inputs, INT(step - 1)), INT(step)), INT(width))
    vectors = code.udiv(code.mul(rows, stride), INT(unit.step))
    copy = code.ptrtoint(code.alloca(unit.vector, size=vectors), INT)
    with code.loop(0, rows) as (row, _), code.loop(0, inputs, step) as (index, _):
        source = code.add(code.mul(row, inputs), index)
        target = code.add(code.mul(row, stride), code.mul(code.udiv(index, INT(step)), INT(width)))
        if wide:
            numbers = code.vector(x, dtype, source, WIDE, code.sub(inputs, index))
            parts = [shuffle(code, met(shift), numbers) for shift in range(4)]
        else:
            parts = [unit.read(code, x, dtype, code.add(source, INT(i))) for i in (0, LANES)]
            parts.append(code.fmul(code.fadd(*parts), ir.Constant(FLOATS, [-8.0] * LANES)))
        for i, part in enumerate(parts):
            place = code.at(copy, unit.dtype, code.add(target, INT(i * unit.step)))
            code.store(part, code.bitcast(place, part.type.as_pointer()), align=1)
    return Prepared(copy, stride)


def met(shift: int) -> list[int]:
    """Return the indices, among WIDE numbers of a row of x, of the numbers that are multiplied by the low 4 bits of
    each 16-bit word in 64 bytes of int4 codes, after the words are shifted right by 4 * shift bits."""
    first = shift // 2 + GROUP // 2 * (shift % 2)
    return [GROUP * (lane // 4) + 4 * (lane % 4) + first + more for lane in range(LANES) for more in (0, 2)]


def dot(
    code: Code, unit: Unit, x: Prepared, rows: Sequence[Any], codes: Any, scales: Any, output: Any, inputs: Any
) -> list[Any]:
    """Emit code for the products of the rows `rows` of x and row `output` of an int4 weight, each as a vector of
    partial sums: each group's sum times its scale, added over groups. `inputs` is the length of a row."""
    begin, starts = code.mul(output, inputs), [code.mul(row, x.stride) for row in rows]
    if isinstance(unit, AVX512DotUnit):
        return wide_dot(code, unit, x.address, starts, codes, scales, begin, inputs)
    with code.loop(0, inputs, GROUP, [ZERO] * len(rows)) as (index, totals):
        place = code.add(begin, index)
        low, high = halves(code, codes, place)
        scale = code.repeat(code.scalar(scales, "bfloat16", code.lshr(place, INT(5))))
        offset = code.mul(code.udiv(index, INT(GROUP)), INT(GROUP + LANES))
        for row, start in enumerate(starts):
            at = code.add(start, offset)
            first, second, less = (code.floats(x.address, "float32", code.add(at, INT(i * LANES))) for i in range(3))
            # a third term subtracts the 8: `prepare` stored the sum of the two numbers that meet a byte, times -8
            totals[row] = code.fma(code.fma(high, second, code.fma(low, first, less)), scale, totals[row])
    return totals


def wide_dot(
    code: Code,
    unit: AVX512DotUnit,
    x: Any,
    starts: Sequence[Any],
    codes: Any,
    scales: Any,
    begin: Any,
    inputs: Any,
) -> list[Any]:
    """Emit the code of `dot` for a CPU with AVX512-BF16, WIDE weights at a time: a table gives the bf16 number of each
    code. The rows of x begin at the indices `starts` of x, the row of the weight at index `begin` of the weight."""
    table = ir.Constant(WORDS, NUMBERS * 2)
    full_end = code.sub(inputs, code.urem(inputs, INT(WIDE)))

    def add(index: Any, totals: list[Any], left: Any) -> None:
        """Emit code that adds the products from `index` on, of `left` weights (None: WIDE), to `totals`."""
        place = code.add(begin, index)
        groups, words = (None, None) if left is None else (code.lshr(left, INT(5)), code.lshr(left, INT(3)))
        bits = code.vector(code.add(codes, code.lshr(place, INT(1))), "int32", 0, LANES, words)
        sums = [ZERO] * len(starts)
        for shift in range(4):
            lowest = code.bitcast(code.lshr(bits, integers(4 * shift)), WORDS)
            numbers = code.intrinsic("llvm.x86.avx512.permvar.hi.512", WORDS, [table, lowest])
            for row, start in enumerate(starts):
                numbers_of_x = unit.read(code, x, unit.dtype, code.add(start, code.add(index, INT(shift * unit.step))))
                sums[row] = unit.add(code, code.bitcast(numbers, unit.vector), numbers_of_x, sums[row])
        four = code.vector(scales, "bfloat16", code.lshr(place, INT(5)), 4, groups)
        scale = code.bitcast(shuffle(code, SCALES, four, ir.Constant(four.type, [0] * 4)), FLOATS)
        for row, part in enumerate(sums):
            totals[row] = code.fma(part, scale, totals[row])

    with code.loop(0, full_end, WIDE, [ZERO] * len(starts)) as (index, totals):
        add(index, totals, None)
    with code.loop(full_end, inputs, WIDE, totals) as (index, totals):
        add(index, totals, code.sub(inputs, index))
    return totals
