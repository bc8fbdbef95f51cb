"""Code of the kernels of a mixture of experts: the choice of each token's experts, and products with their weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from onward.kernels.llvm.code import FLOAT, INT, Code
from onward.kernels.llvm.compiler import Emit, Values, arguments, callable_kernel
from onward.kernels.llvm.elementwise import exp, like, spans, total
from onward.kernels.llvm.products import SIZES, Product
from onward.kernels.llvm.units import unit_for
from onward.kernels.memory import Kernel

ChosenArguments = arguments(
    "ChosenArguments",
    *("y", "x", "experts", "weights", "biases", "assignments", "repeats", "count", "outputs", "inputs"),
)
TopArguments = arguments("TopArguments", "values", "indices", "x")
SoftmaxArguments = arguments("SoftmaxArguments", "out", "x")
PickArguments = arguments("PickArguments", "out", "x", "indices")
PlaceArguments = arguments("PlaceArguments", "out", "indices")


@dataclass(frozen=True)
class ChosenProduct(Product):
    """The code of products of rows of x with the weight of one expert. The kernel's arguments have two more values than
    ProductArguments: `order`, the address of the indices of the assignments to this expert, and `repeats`, the number
    of experts of each row of x."""

    def x_index(self, code: Code, given: Values, row: Any) -> Any:
        return code.mul(code.udiv(code.scalar(given.order, "int64", row), given.repeats), given.inputs)

    def y_index(self, code: Code, given: Values, row: Any) -> Any:
        return code.mul(code.scalar(given.order, "int64", row), given.outputs)


def emit_chosen(dtype: str, biased: bool) -> Emit:
    """Return the function that emits the code of the kernel for products with the weights of chosen experts
    (`kernels/chosen.py`), with the arguments ChosenArguments. Threads divide the outputs; each of the `count` experts
    multiplies all rows assigned to it together, so its weight is read once."""
    product = ChosenProduct(dtype, dtype, biased, unit_for(dtype))

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        order = code.ptrtoint(code.alloca(INT, size=code.add(given.assignments, INT(1))), INT)
        size = code.mul(given.outputs, INT(SIZES[dtype]))  # bytes of an expert's bias
        write_unknown(code, given, dtype, first, end)
        with code.loop(0, given.count) as (expert, _):
            with code.loop(0, given.assignments, 1, [INT(0)]) as (assignment, rows):
                code.store(assignment, code.at(order, "int64", rows[0]))
                own = code.icmp_signed("==", code.scalar(given.experts, "int64", assignment), expert)
                rows[0] = code.add(rows[0], code.zext(own, INT))
            weight = code.add(given.weights, code.mul(expert, code.mul(size, given.inputs)))
            bias = code.add(given.biases, code.mul(expert, size))
            with code.if_then(code.icmp_signed(">", rows[0], INT(0))):
                each = Values(**vars(given), weight=weight, bias=bias, rows=rows[0], order=order)
                product.emit(code, each, first, end)

    return emit


def write_unknown(code: Code, given: Values, dtype: str, first: Any, end: Any) -> None:
    """Emit code that writes NaN to y, from column `first` to `end` - 1, for assignments to experts that do not
    exist."""
    with code.loop(0, given.assignments) as (assignment, _):
        expert = code.scalar(given.experts, "int64", assignment)
        with code.if_then(code.icmp_unsigned(">=", expert, given.count)), code.loop(first, end) as (output, _):
            place = code.add(code.mul(assignment, given.outputs), output)
            code.put(FLOAT(math.nan), given.y, dtype, place)


@cache
def chosen(dtype: str, biased: bool) -> Kernel:
    """Compile the kernel of `emit_chosen`; return it as a function whose arguments are the fields of
    ChosenArguments."""
    return callable_kernel(ChosenArguments, emit_chosen(dtype, biased))


def top(width: int, count: int) -> Emit:
    """Return the function that emits the code of the kernel for the `count` greatest numbers of each row of x (N,
    width), in fp32, in descending order, and their indices, with the arguments TopArguments; equal numbers keep their
    order. Threads divide the rows. If NaN leaves fewer than `count` numbers that can be compared, the remaining results
    are NaN at index 0."""

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (row, _):
            start, before = code.mul(row, INT(width)), (FLOAT(math.inf), INT(-1))
            for place in range(count):
                with code.loop(0, width, 1, [FLOAT(math.nan), INT(0)]) as (index, best):
                    value = code.scalar(given.x, "float32", code.add(start, index))
                    equal = code.fcmp_ordered("==", value, before[0])
                    left = code.or_(
                        code.fcmp_ordered("<", value, before[0]),
                        code.and_(equal, code.icmp_signed(">", index, before[1])),
                    )
                    better = code.and_(left, code.not_(code.fcmp_ordered("<=", value, best[0])))
                    best[0], best[1] = code.select(better, value, best[0]), code.select(better, index, best[1])
                before = best[0], best[1]
                target = code.add(code.mul(row, INT(count)), INT(place))
                code.put(best[0], given.values, "float32", target)
                code.put(best[1], given.indices, "int64", target)

    return emit


def softmax(width: int) -> Emit:
    """Return the function that emits the code of the kernel for the softmax of each row of x (N, width), in fp32, with
    the arguments SoftmaxArguments. Threads divide the rows."""

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (row, _):
            start = code.mul(row, INT(width))
            with code.loop(0, width, 1, [FLOAT(-math.inf)]) as (index, peak):
                value = code.scalar(given.x, "float32", code.add(start, index))
                peak[0] = code.select(code.fcmp_unordered(">", value, peak[0]), value, peak[0])

            def weight(index: Any, read: Callable[..., Any]) -> Any:
                value = read(given.x, "float32", code.add(start, index))
                return exp(code, code.fsub(value, like(code, value, peak[0])))

            factor = code.fdiv(FLOAT(1.0), total(code, width, weight))
            for index, read in spans(code, width):
                value = weight(index, read)
                value = code.fmul(value, like(code, value, factor))
                code.put(value, given.out, "float32", code.add(start, index))

    return emit


def pick(width: int, count: int) -> Emit:
    """Return the function that emits the code of the kernel for the numbers at the indices (N, count) of each row of x
    (N, width), in fp32, with the arguments PickArguments; an index that is not below `width` gives NaN. Threads divide
    the N * count numbers."""

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (item, _):
            index = code.scalar(given.indices, "int64", item)
            known = code.icmp_unsigned("<", index, INT(width))
            start = code.mul(code.udiv(item, INT(count)), INT(width))
            value = code.scalar(given.x, "float32", code.add(start, code.select(known, index, INT(0))))
            code.put(code.select(known, value, FLOAT(math.nan)), given.out, "float32", item)

    return emit


def place(value: float, width: int, count: int) -> Emit:
    """Return the function that emits the code of the kernel that writes `value` at the indices (N, count) of each row
    of `out` (N, width), in fp32, with the arguments PlaceArguments; an index that is not below `width` is skipped.
    Threads divide the N * count indices."""

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (item, _):
            index = code.scalar(given.indices, "int64", item)
            start = code.mul(code.udiv(item, INT(count)), INT(width))
            with code.if_then(code.icmp_unsigned("<", index, INT(width))):
                code.put(FLOAT(value), given.out, "float32", code.add(start, index))

    return emit
