"""Code of products of two batches of matrices, (N, B, I) times (N, I, O), such as each head's vectors times the head's
own weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onward.kernels.llvm.code import FLOAT, INT, LANES, Code
from onward.kernels.llvm.compiler import Emit, Values, arguments
from onward.kernels.llvm.elementwise import like
from onward.kernels.llvm.products import SIZES, Product
from onward.kernels.llvm.units import ZERO, unit_for

BatchArguments = arguments(
    "BatchArguments",
    *("y", "x", "weights", "x_matrix", "x_row", "weight_matrix", "rows", "outputs", "inputs"),
)
WIDE = 4 * LANES  # number of weight columns that are summed together


class StridedProduct(Product):
    """The code of a product of x with a weight in which the rows of x are `x_row` numbers apart in memory instead of
    contiguous."""

    def x_index(self, code: Code, given: Values, row: Any) -> Any:
        return code.mul(row, given.x_row)


def batches(dtype: str, transposed: bool) -> Emit:
    """Return the function that emits the code of a kernel for y = x W of each pair of matrices, x (N, B, I) and W (N,
    I, O), stored as (N, O, I) if `transposed`; B is `rows`. The kernel's arguments are BatchArguments, with the strides
    of matrices and rows counted in numbers. Rows of W and y are contiguous. Threads divide the pairs."""
    product = StridedProduct(dtype, dtype, False, unit_for(dtype))

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        sizes = {"x": given.x_matrix, "weight": given.weight_matrix, "y": code.mul(given.rows, given.outputs)}
        with code.loop(first, end) as (pair, _):
            starts = {"x": given.x, "weight": given.weights, "y": given.y}
            for name, size in sizes.items():
                offset = code.mul(pair, code.mul(size, INT(SIZES[dtype])))
                starts[name] = code.add(starts[name], offset)
            one = Values(**{**vars(given), **starts})
            if transposed:
                product.emit(code, one, INT(0), given.outputs)
            else:
                add_rows(code, one, dtype)

    return emit


def add_rows(code: Code, given: Values, dtype: str) -> None:
    """Emit code that writes the product y (B, O) of x (B, I) and a weight (I, O) that is not transposed: each row of y
    is the sum of the weight's rows, multiplied by the numbers in the row of x. `given` are the kernel's arguments."""
    for begin, stop, width in column_ranges(code, given.outputs):
        read, zero = (code.floats, ZERO) if width > 1 else (code.scalar, FLOAT(0.0))
        lanes = range(0, width, LANES)
        with code.loop(begin, stop, width) as (column, _), code.loop(0, given.rows) as (row, _):
            x_index = code.mul(row, given.x_row)
            with code.loop(0, given.inputs, 1, [zero] * len(lanes)) as (index, totals):
                factor = like(code, zero, code.scalar(given.x, dtype, code.add(x_index, index)))
                place = code.add(code.mul(index, given.outputs), column)
                for i, lane in enumerate(lanes):
                    numbers = read(given.weight, dtype, code.add(place, INT(lane)))
                    totals[i] = code.fma(factor, numbers, totals[i])
            place = code.add(code.mul(row, given.outputs), column)
            for lane, total in zip(lanes, totals):
                code.put(total, given.y, dtype, code.add(place, INT(lane)))


def column_ranges(code: Code, outputs: Any) -> Iterator[tuple[Any, Any, int]]:
    """Emit code that divides the columns 0 to `outputs` - 1 into ranges, which are read WIDE, LANES and 1 columns at a
    time; yield (begin, end, columns read at a time) of each range."""
    begin = INT(0)
    for width in WIDE, LANES, 1:
        end = code.sub(outputs, code.urem(outputs, INT(width)))
        yield begin, end, width
        begin = end
