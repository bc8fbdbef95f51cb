"""Products of a few rows with a weight, y = x Wᵀ + bias, at the speed at which memory gives the weight.

Each row of the weight is read once, from beginning to end, for all rows of x. A product is summed in the same order
for any number of rows and threads, so it does not depend on the other rows.
Shapes: N rows, I inputs, O outputs; x (N, I), weight (O, I), y (N, O).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from onward.model.kernels.compiler import FLOATS, INT, LANES, Code, callable_kernel, integers

TILE = 4  # rows of x in one pass over a row of the weight
GROUP = 32  # int4 weights with the same scale
ZERO = ir.Constant(FLOATS, [0.0] * LANES)


class Plain:
    """Weights in a dtype of PyTorch: fp32, bf16, or int8 with an fp32 scale for each output."""

    step, unroll, width = LANES, 4, LANES  # `width` numbers of the prepared x belong to `step` weights

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def accumulate(self, code: Code, weight: Any, scales: Any, place: Any, x: Sequence[Any], sums: list[Any]) -> None:
        """Add the products of `step` weights from `place` on with numbers at each pointer of x to the sums."""
        numbers = code.floats(weight, self.dtype, place)
        for row, pointer in enumerate(x):
            sums[row] = code.fma(numbers, code.floats(pointer, "float32", 0), sums[row])


class Int4:
    """Two weights in a byte: the first half of a GROUP in the low bits, the second half in the high bits, each plus 8.

    Each group has a bf16 scale. The 8 is subtracted as a third product: `prepare` puts -8 times the sum of the two
    numbers of x that meet a byte behind those of the group.
    """

    step, unroll, width = GROUP, 2, GROUP + LANES

    def accumulate(self, code: Code, weight: Any, scales: Any, place: Any, x: Sequence[Any], sums: list[Any]) -> None:
        """As in Plain, for a group."""
        bits = code.bytes(weight, code.lshr(place, INT(1)))
        low = code.uitofp(code.and_(bits, integers(15)), FLOATS)
        high = code.uitofp(code.lshr(bits, integers(4)), FLOATS)
        scale = code.repeat(code.scalar(scales, "bfloat16", code.lshr(place, INT(5))))
        for row, pointer in enumerate(x):
            first, second, offset = (code.floats(pointer, "float32", i * LANES) for i in range(3))
            sums[row] = code.fma(code.fma(high, second, code.fma(low, first, offset)), scale, sums[row])


FORMATS: dict[str, Plain | Int4] = {name: Plain(name) for name in ("float32", "bfloat16", "int8")} | {"int4": Int4()}


def prepare(code: Code, x: Any, dtype: str, rows: Any, inputs: Any, form: Plain | Int4) -> tuple[Any, Any]:
    """x as the format wants it, in fp32, and the numbers of a row of it; each thread does so for itself."""
    if isinstance(form, Plain) and dtype == "float32":
        return x, inputs
    stride = code.mul(code.udiv(code.add(inputs, INT(form.step - 1)), INT(form.step)), INT(form.width))
    copy = code.alloca(FLOATS, size=code.udiv(code.mul(rows, stride), INT(LANES)))
    copy = code.ptrtoint(copy, INT)
    whole = code.sub(inputs, code.urem(inputs, INT(form.step)))
    with code.loop(0, rows) as (row, _):
        source, target = code.mul(row, inputs), code.mul(row, stride)
        with code.loop(0, whole, form.step) as (index, _):
            numbers = [
                code.floats(x, dtype, code.add(source, code.add(index, INT(i)))) for i in range(0, form.step, LANES)
            ]
            if isinstance(form, Int4):
                numbers.append(code.fmul(code.fadd(*numbers), ir.Constant(FLOATS, [-8.0] * LANES)))
            place = code.add(target, code.mul(code.udiv(index, INT(form.step)), INT(form.width)))
            for i, vector in enumerate(numbers):
                code.put(vector, copy, "float32", code.add(place, INT(i * LANES)))
        with code.loop(whole, inputs) as (index, _):
            code.put(code.scalar(x, dtype, code.add(source, index)), copy, "float32", code.add(target, index))
    return copy, stride


def emit(form: Plain | Int4, dtype: str, biased: bool) -> Callable[[Code, Sequence[Any], Any, Any], None]:
    """The code of the outputs from `first` to `end` - 1, for x, bias and y of a dtype."""

    def products(code: Code, arguments: Sequence[Any], first: Any, end: Any) -> None:
        x, weight, scales, bias, y, rows, outputs, inputs = arguments
        x, stride = prepare(code, x, dtype, rows, inputs, form)
        tiled = code.sub(rows, code.urem(rows, INT(TILE)))
        with code.loop(first, end) as (output, _):
            for start, stop, count in (0, tiled, TILE), (tiled, rows, 1):
                with code.loop(start, stop, count) as (row, _):
                    places = [code.add(row, INT(i)) for i in range(count)]
                    totals = dot(
                        code, form, [code.mul(place, stride) for place in places], x, weight, scales, output, inputs
                    )
                    for place, total in zip(places, totals):
                        if form is FORMATS["int8"]:
                            total = code.fmul(total, code.scalar(scales, "float32", output))
                        if biased:
                            total = code.fadd(total, code.scalar(bias, dtype, output))
                        code.put(total, y, dtype, code.add(code.mul(place, outputs), output))

    return products


def dot(
    code: Code, form: Plain | Int4, starts: Sequence[Any], x: Any, weight: Any, scales: Any, output: Any, inputs: Any
) -> list[Any]:
    """The products of one row of the weight with the rows of x that begin at `starts`."""
    begin, width = code.mul(output, inputs), form.step * form.unroll
    wide, whole = (code.sub(inputs, code.urem(inputs, INT(n))) for n in (width, form.step))
    sums = [[ZERO] * len(starts) for _ in range(form.unroll)]  # several, since a sum waits for the one before

    def add(index: Any, sums: list[Any], u: int) -> None:
        index = code.add(index, INT(u * form.step))
        offset = code.mul(code.udiv(index, INT(form.step)), INT(form.width)) if form.width != form.step else index
        pointers = [code.ptrtoint(code.at(x, "float32", code.add(start, offset)), INT) for start in starts]
        form.accumulate(code, weight, scales, code.add(begin, index), pointers, sums)

    flat = [total for part in sums for total in part]
    with code.loop(0, wide, width, flat) as (index, flat):
        for u in range(form.unroll):
            part = flat[u * len(starts) : (u + 1) * len(starts)]
            add(index, part, u)
            flat[u * len(starts) : (u + 1) * len(starts)] = part
    sums = [flat[u * len(starts) : (u + 1) * len(starts)] for u in range(form.unroll)]
    with code.loop(wide, whole, form.step, sums[0]) as (index, sums[0]):
        add(index, sums[0], 0)
    while len(sums) > 1:
        sums = [[code.fadd(a, b) for a, b in zip(*pair)] for pair in zip(sums[::2], sums[1::2])]
    totals = [code.sum(total) for total in sums[0]]
    if isinstance(form, Plain):  # int4 weights come in whole groups
        with code.loop(whole, inputs, 1, totals) as (index, totals):
            number = code.scalar(weight, form.dtype, code.add(begin, index))
            for i, start in enumerate(starts):
                totals[i] = code.fma(number, code.scalar(x, "float32", code.add(start, index)), totals[i])
    return totals


@cache
def products(weight_format: str, dtype: str, biased: bool, cpu: str | None = None) -> Callable[..., None]:
    """The kernel `(x, weight, scales, bias, y, N, O, I, O, threads)`, given addresses, for weights of a format
    (float32, bfloat16, int8 or int4) and x, bias and y of a dtype (float32 or bfloat16)."""
    return callable_kernel(8, emit(FORMATS[weight_format], dtype, biased), cpu)
