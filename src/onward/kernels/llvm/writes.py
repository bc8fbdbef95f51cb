"""Code of the kernels that write to a contiguous or a paged KV cache, as `kernels/cached_attention.py` describes it."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from onward.kernels.llvm.code import FLOAT, FLOATS, INT, LANES, Code
from onward.kernels.llvm.compiler import Emit, Values, arguments
from onward.kernels.llvm.elementwise import clamp, like, spans, unary

WriteArguments = arguments(
    "WriteArguments", "entry", "scales", "vectors", "positions", "tokens", "slots", "table", "columns"
)
GREATEST = 127.0  # largest code
TINY = 2.0**-126  # the smallest normal number of fp32 and bf16
absolute, nearest = unary("llvm.fabs"), unary("llvm.rint")


def write(width: int, dtype: str, paged: bool) -> Emit:
    """Return the function that emits the code of a kernel that writes vectors of the new tokens (B, T, width), such as
    their keys, to an entry of the KV cache, (B, S, width) or, if `paged`, (blocks, S, width), at the tokens'
    `positions` (B, T). The kernel's arguments are WriteArguments, where `tokens` is T and `columns` the columns of the
    block table; threads divide the tokens."""

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (token, _):
            target, source = code.mul(slot_of(code, given, token, paged), INT(width)), code.mul(token, INT(width))
            for index, read in spans(code, width):
                vectors = read(given.vectors, dtype, code.add(source, index))
                code.put(vectors, given.entry, dtype, code.add(target, index))

    return emit


def write_codes(count: int, width: int, dtype: str, paged: bool) -> Emit:
    """Return the function that emits the code of a kernel like that of `write`, which quantizes `count` vectors of each
    new token, (B, T, count, width) in `dtype`, as `cache_codes.quantize` does: it writes int8 codes to the entry, and
    to `scales` one scale per vector in `dtype`."""

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (token, _):
            slot = slot_of(code, given, token, paged)
            with code.loop(0, count) as (number, _):
                vector = code.add(code.mul(slot, INT(count)), number)
                target = code.mul(vector, INT(width))
                source = code.mul(code.add(code.mul(token, INT(count)), number), INT(width))
                scale = code.fdiv(peak(code, given.vectors, dtype, source, width), FLOAT(GREATEST))
                scale = clamp(code, code.rounded(scale, dtype), TINY, None)
                code.put(scale, given.scales, dtype, vector)
                for index, read in spans(code, width):
                    value = read(given.vectors, dtype, code.add(source, index))
                    value = nearest(code, code.fdiv(value, like(code, value, scale)))
                    value = clamp(code, value, -GREATEST, GREATEST)
                    code.put(value, given.entry, "int8", code.add(target, index))

    return emit


def peak(code: Code, vectors: Any, dtype: str, start: Any, width: int) -> Any:
    """Emit code for the greatest absolute value of `width` numbers of the tensor `vectors` from index `start` on; NaN
    if one of them is NaN."""
    full_end = width - width % LANES

    def greater(a: Any, b: Any) -> Any:
        return code.call(code.declare("llvm.maximum", a.type, [a.type] * 2), [a, b])

    with code.loop(0, full_end, LANES, [ir.Constant(FLOATS, [0.0] * LANES)]) as (index, peaks):
        peaks[0] = greater(peaks[0], absolute(code, code.floats(vectors, dtype, code.add(start, index))))
    reduce = code.declare("llvm.vector.reduce.fmaximum", FLOAT, [FLOATS], FLOATS)
    with code.loop(full_end, width, 1, [code.call(reduce, [peaks[0]])]) as (index, greatest):
        greatest[0] = greater(greatest[0], absolute(code, code.scalar(vectors, dtype, code.add(start, index))))
    return greatest[0]


def slot_of(code: Code, given: Values, token: Any, paged: bool) -> Any:
    """Emit code for the index of the slot of a new token among all slots of the cache, given the token's index."""
    position, row = code.scalar(given.positions, "int64", token), code.udiv(token, given.tokens)
    block = block_of(code, given, row, code.udiv(position, given.slots)) if paged else row
    return code.add(code.mul(block, given.slots), code.urem(position, given.slots))


def block_of(code: Code, given: Values, row: Any, column: Any) -> Any:
    """Emit code that reads the block number at `row` and `column` of the block table of a paged KV cache; `given` are
    the kernel's arguments, with the table's address."""
    return code.scalar(given.table, "int64", code.add(code.mul(row, given.columns), column))
