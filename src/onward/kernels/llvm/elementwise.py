"""Code of the kernels for elementwise operations, norms and copies of a decoding step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir
from torch import Tensor

from onward.kernels.llvm.code import FLOAT, FLOATS, INT, INTS, LANES, Code, integers
from onward.kernels.llvm.compiler import Arguments, Emit, Values, arguments

Value = Any  # an LLVM value: an fp32 number, a vector of them, or an int64
Formula = Callable[..., Value]  # (code, values of the operands ...) -> value
SumArguments = arguments("SumArguments", "out", "x")
LayerNormArguments = arguments("LayerNormArguments", "out", "x", "weight", "bias")
GatherArguments = arguments("GatherArguments", "out", "weight", "ids", "rows")


@dataclass(frozen=True)
class Layout:
    """The shape, strides and dtype of a tensor. A kernel is compiled for these constants; the address of the tensor is
    an argument."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(tensor: Tensor, shape: Sequence[int] | None = None) -> Layout:
        """Return the layout of a tensor, broadcast to `shape` (None: its own shape)."""
        tensor = tensor if shape is None else tensor.expand(*shape)
        return Layout(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))


@cache
def operands(count: int) -> type[Arguments]:
    """Return the structure of the arguments of an elementwise kernel: `out` and `count` operands x0, x1, ..."""
    return arguments(f"Operands{count}", "out", *(f"x{i}" for i in range(count)))


def elementwise(formula: Formula, layouts: Sequence[Layout]) -> Emit:
    """Return the function that emits the code of a kernel that computes `formula` for every element.

    `layouts`, simplified by `merged`, are the layouts of the result and of the operands. Threads divide the first
    dimension, whose size is not a constant of the code.
    """
    shape, strides = layouts[0].shape, [layout.strides for layout in layouts]
    vectors = all(layout.dtype != "int64" and layout.strides[-1] < 2 for layout in layouts) and strides[0][-1] == 1

    def emit(code: Code, given: Values, first: Value, end: Value) -> None:
        addresses = [given.out, *(getattr(given, f"x{i}") for i in range(len(layouts) - 1))]

        def moved(offsets: Sequence[Value], index: Value, dimension: int) -> list[Value]:
            return [code.add(o, code.mul(index, INT(s[dimension]))) for o, s in zip(offsets, strides)]

        def last(offsets: Sequence[Value], start: Value, stop: Value) -> None:
            size = code.sub(stop, start)
            middle = code.sub(stop, code.urem(size, INT(LANES))) if vectors else start
            if vectors:
                with code.loop(start, middle, LANES) as (index, _):
                    element(moved(offsets, index, -1), True)
            with code.loop(middle, stop) as (index, _):
                element(moved(offsets, index, -1), False)

        def element(indices: Sequence[Value], vector: bool) -> None:
            values = []
            for address, layout, place in zip(addresses[1:], layouts[1:], indices[1:]):
                if vector and layout.strides[-1]:
                    values.append(code.floats(address, layout.dtype, place))
                else:
                    value = code.scalar(address, layout.dtype, place)
                    values.append(code.repeat(value) if vector else value)
            code.put(formula(code, *values), addresses[0], layouts[0].dtype, indices[0])

        def nest(dimension: int, offsets: Sequence[Value], start: Value, stop: Value) -> None:
            if dimension == len(shape) - 1:
                last(offsets, start, stop)
                return
            with code.loop(start, stop) as (index, _):
                nest(dimension + 1, moved(offsets, index, dimension), INT(0), INT(shape[dimension + 1]))

        nest(0, [INT(0)] * len(layouts), first, end)

    return emit


def merged(layouts: Sequence[Layout]) -> list[Layout]:
    """Simplify the layouts of tensors of the same shape: drop dimensions of size 1, and merge neighboring dimensions
    that are contiguous in all layouts."""
    dims = [d for d in range(len(layouts[0].shape)) if layouts[0].shape[d] != 1]
    shape = [layouts[0].shape[d] for d in dims] or [1]
    strides = [[layout.strides[d] for d in dims] or [0] for layout in layouts]
    if not dims:
        strides[0] = [1]
    for d in range(len(shape) - 2, -1, -1):
        if all(s[d] == s[d + 1] * shape[d + 1] for s in strides):
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
            for s in strides:
                del s[d]
    return [Layout(tuple(shape), tuple(s), layout.dtype) for s, layout in zip(strides, layouts)]


def row_sums(x: Layout, factor: float) -> Emit:
    """Return the function that emits the code of a kernel for the sum over the last dimension of a contiguous tensor
    with the layout `x`, times `factor`, in fp32. The kernel's arguments are SumArguments; threads divide the rows."""
    width = x.shape[-1]

    def emit(code: Code, given: Values, first: Value, end: Value) -> None:
        with code.loop(first, end) as (row, _):
            total = row_sum(code, given.x, x.dtype, code.mul(row, INT(width)), width)
            code.put(code.fmul(total, FLOAT(factor)), given.out, "float32", row)

    return emit


def row_sum(
    code: Code, source: Value, dtype: str, start: Value, width: int, term: Callable[[Value], Value] = lambda x: x
) -> Value:
    """Emit code for the sum of term(x) over `width` numbers x of the tensor `source`, in `dtype`, from index `start`
    on."""
    return total(code, width, lambda index, read: term(read(source, dtype, code.add(start, index))))


def total(code: Code, width: int, term: Callable[[Value, Callable[..., Value]], Value]) -> Value:
    """Emit code for the sum of `width` terms. `term(index, read)` emits the term at an index, or a vector of LANES
    terms from there; `read` is the method of `Code` that reads one number or LANES numbers accordingly."""
    full_end = width - width % LANES
    with code.loop(0, full_end, LANES, [ir.Constant(FLOATS, [0.0] * LANES)]) as (index, sums):
        sums[0] = code.fadd(sums[0], term(index, code.floats))
    with code.loop(full_end, width, 1, [code.sum(sums[0])]) as (index, sums):
        sums[0] = code.fadd(sums[0], term(index, code.scalar))
    return sums[0]


def spans(code: Code, width: int, vectors: bool = True) -> Iterator[tuple[Value, Callable[..., Value]]]:
    """Emit loops over `width` indices; yield the index and the method of `Code` that reads numbers there: with
    `vectors`, first LANES at a time, then one by one."""
    full_end = width - width % LANES if vectors else 0
    for start, stop, step, read in (0, full_end, LANES, code.floats), (full_end, width, 1, code.scalar):
        with code.loop(start, stop, step) as (index, _):
            yield index, read


def layer_norm(x: Layout, eps: float, weight: bool, bias: bool) -> Emit:
    """Return the function that emits the code of a kernel for a layer norm over the last dimension of a tensor with the
    layout `x`. The kernel's arguments are LayerNormArguments; threads divide the rows. `weight` and `bias`: whether the
    norm has a weight and a bias."""
    width = x.shape[-1]

    def emit(code: Code, given: Values, first: Value, end: Value) -> None:
        with code.loop(first, end) as (row, _):
            start = code.mul(row, INT(width))
            average = code.fmul(row_sum(code, given.x, x.dtype, start, width), FLOAT(1 / width))

            def square(value: Value) -> Value:
                distance = code.fsub(value, like(code, value, average))
                return code.fmul(distance, distance)

            variance = code.fmul(row_sum(code, given.x, x.dtype, start, width, square), FLOAT(1 / width))
            factor = code.fdiv(FLOAT(1.0), root(code, code.fadd(variance, FLOAT(eps))))
            for index, read in spans(code, width):
                value = read(given.x, x.dtype, code.add(start, index))
                value = code.fmul(code.fsub(value, like(code, value, average)), like(code, value, factor))
                if weight:
                    value = code.fmul(value, read(given.weight, x.dtype, index))
                if bias:
                    value = code.fadd(value, read(given.bias, x.dtype, index))
                code.put(value, given.out, x.dtype, code.add(start, index))

    return emit


def gather(rows: Layout, index_dtype: str) -> Emit:
    """Return the function that emits the code of a kernel for an embedding lookup in a table with the layout `rows`.
    The kernel's arguments are GatherArguments; threads divide the token ids. An id that is not below the number of rows
    gives NaN."""
    width, (row_stride, stride) = rows.shape[-1], rows.strides

    def emit(code: Code, given: Values, first: Value, end: Value) -> None:
        with code.loop(first, end) as (item, _):
            row = code.scalar(given.ids, index_dtype, item)
            known = code.icmp_unsigned("<", row, given.rows)
            start = code.mul(code.select(known, row, INT(0)), INT(row_stride))
            target = code.mul(item, INT(width))
            for index, read in spans(code, width, vectors=stride == 1):
                value = read(given.weight, rows.dtype, code.add(start, code.mul(index, INT(stride))))
                value = code.select(known, value, like(code, value, math.nan))
                code.put(value, given.out, rows.dtype, code.add(target, index))

    return emit


def like(code: Code, value: Value, number: Value) -> Value:
    """Return `number`, an LLVM value or constant, with the type of `value`: unchanged if `value` is a scalar, repeated
    if it is a vector."""
    if isinstance(number, int | float):
        return ir.Constant(FLOATS, [float(number)] * LANES) if value.type == FLOATS else value.type(number)
    return code.repeat(number) if value.type == FLOATS else number


def unary(name: str) -> Formula:
    """Return the formula that applies LLVM's unary function `name` to a number or a vector."""

    def formula(code: Code, x: Value) -> Value:
        return code.call(code.declare(name, x.type, [x.type]), [x])

    return formula


root = unary("llvm.sqrt")


def exp(code: Code, x: Value) -> Value:
    """Emit code for e ** x, with x limited to -87.33 to 88.72, within 2 units in the last place: 2 ** n times a
    polynomial of the remainder (Cody and Waite 1980)."""
    x = clamp(code, x, -87.33, 88.72)
    n = unary("llvm.rint")(code, code.fmul(x, like(code, x, math.log2(math.e))))
    rest = code.fma(n, like(code, x, -0.693359375), x)
    rest = code.fma(n, like(code, x, 2.12194440e-4), rest)
    y = like(code, x, 1.9875691500e-4)
    for c in 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1:
        y = code.fma(y, rest, like(code, x, c))
    y = code.fadd(code.fma(y, code.fmul(rest, rest), rest), like(code, x, 1.0))
    kind = INTS if x.type == FLOATS else ir.IntType(32)
    bits, constant = code.fptosi(n, kind), integers if x.type == FLOATS else kind
    half = code.ashr(bits, constant(1))  # 2 ** n in two factors, since 2 ** 128 overflows fp32

    def power(exponent: Value) -> Value:
        return code.bitcast(code.shl(code.add(exponent, constant(127)), constant(23)), x.type)

    return code.fmul(code.fmul(y, power(half)), power(code.sub(bits, half)))


def clamp(code: Code, x: Value, least: float | None, greatest: float | None) -> Value:
    """Emit code that limits x to the bounds `least` and `greatest` (None: no bound); NaN stays NaN."""
    if x.type == INT:
        for bound, sign in (least, "<"), (greatest, ">"):
            if bound is not None:
                x = code.select(code.icmp_signed(sign, x, INT(int(bound))), INT(int(bound)), x)
        return x
    for bound, sign in (least, "<"), (greatest, ">"):
        if bound is not None:
            x = code.select(code.fcmp_ordered(sign, x, like(code, x, bound)), like(code, x, bound), x)
    return x


def relu(code: Code, x: Value) -> Value:
    return clamp(code, x, 0.0, None)


def sigmoid(code: Code, x: Value) -> Value:
    one = like(code, x, 1.0)
    return code.fdiv(one, code.fadd(one, exp(code, code.fneg(x))))


def softplus(code: Code, x: Value) -> Value:
    """Emit code for log(1 + e ** x) or, above 20, x itself, as in PyTorch."""
    small = by_element(code, "log1pf", exp(code, clamp(code, x, None, 20.0)))
    return code.select(code.fcmp_ordered(">", x, like(code, x, 20.0)), x, small)


def tanh(code: Code, x: Value) -> Value:
    """Emit code for tanh(x): 1 - 2 / (e ** 2x + 1), and x - x³ / 3 + 2 x⁵ / 15 near 0, where the first form loses
    digits."""
    one, two = like(code, x, 1.0), like(code, x, 2.0)
    far = code.fsub(one, code.fdiv(two, code.fadd(exp(code, code.fmul(two, x)), one)))
    square = code.fmul(x, x)
    near = code.fma(square, like(code, x, 2 / 15), like(code, x, -1 / 3))
    near = code.fma(code.fmul(near, square), x, x)
    return code.select(code.fcmp_ordered("<", square, like(code, x, 0.01)), near, far)


def silu_derivative(code: Code, x: Value) -> Value:
    """Emit code for the derivative of SiLU: s(x) (1 + x (1 - s(x))), s being the sigmoid."""
    s, one = sigmoid(code, x), like(code, x, 1.0)
    return code.fmul(s, code.fma(x, code.fsub(one, s), one))


def gelu(code: Code, x: Value) -> Value:
    half = code.fmul(x, like(code, x, 0.5))
    inner = code.fmul(x, like(code, x, math.sqrt(0.5)))
    return code.fmul(half, code.fadd(like(code, x, 1.0), by_element(code, "erff", inner)))


def gelu_tanh(code: Code, x: Value) -> Value:
    cube = code.fmul(code.fmul(x, x), x)
    inner = code.fmul(like(code, x, math.sqrt(2 / math.pi)), code.fma(cube, like(code, x, 0.044715), x))
    return code.fmul(code.fmul(x, like(code, x, 0.5)), code.fadd(like(code, x, 1.0), tanh(code, inner)))


def gelu_derivative(code: Code, x: Value) -> Value:
    """Emit code for the derivative of GELU: P(x) + x p(x), P being the distribution function of the normal distribution
    and p its density."""
    inner = code.fmul(x, like(code, x, math.sqrt(0.5)))
    cumulative = code.fmul(code.fadd(like(code, x, 1.0), by_element(code, "erff", inner)), like(code, x, 0.5))
    density = code.fmul(exp(code, code.fneg(code.fmul(inner, inner))), like(code, x, 1 / math.sqrt(2 * math.pi)))
    return code.fma(x, density, cumulative)


def gelu_tanh_derivative(code: Code, x: Value) -> Value:
    """Emit code for the derivative of GELU by tanh: (1 + t) / 2 + x (1 - t²) / 2 sqrt(2 / pi) (1 + 3 * 0.044715 x²), t
    being the tanh in GELU."""
    square, scale, one = code.fmul(x, x), math.sqrt(2 / math.pi), like(code, x, 1.0)
    t = tanh(code, code.fmul(x, code.fma(square, like(code, x, 0.044715 * scale), like(code, x, scale))))
    slope = code.fma(square, like(code, x, 3 * 0.044715 * scale), like(code, x, scale))
    rest = code.fmul(code.fmul(x, slope), code.fsub(one, code.fmul(t, t)))
    return code.fmul(code.fadd(code.fadd(one, t), rest), like(code, x, 0.5))


def by_element(code: Code, name: str, x: Value) -> Value:
    """Emit calls of the function `name` of the C library for the number x, or for each number of the vector x."""
    function = code.module.globals.get(name) or ir.Function(code.module, ir.FunctionType(FLOAT, [FLOAT]), name)
    if x.type == FLOAT:
        return code.call(function, [x])
    for lane in range(LANES):
        place = ir.IntType(32)(lane)
        x = code.insert_element(x, code.call(function, [code.extract_element(x, place)]), place)
    return x
