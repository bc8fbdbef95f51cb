"""Code of kernels for norms, rotations and gates of many tokens, each as one kernel. Results are rounded at the same
points as in PyTorch's separate operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from onward.config.feedforward_parts import ActivationName
from onward.kernels.llvm.code import FLOAT, INT, LANES, Code
from onward.kernels.llvm.compiler import Values, arguments, callable_kernel
from onward.kernels.llvm.elementwise import (
    Formula,
    Layout,
    elementwise,
    gelu,
    gelu_derivative,
    gelu_tanh,
    gelu_tanh_derivative,
    like,
    operands,
    relu,
    root,
    row_sum,
    sigmoid,
    silu_derivative,
    spans,
    total,
)
from onward.kernels.llvm.units import ZERO
from onward.kernels.memory import Kernel

NormArguments = arguments("NormArguments", "out", "factors", "x", "weight")
NormGradientArguments = arguments("NormGradientArguments", "out", "outer", "x", "weight", "factors")
NormWeightGradientArguments = arguments("NormWeightGradientArguments", "out", "outer", "x", "factors", "rows")
RotationArguments = arguments("RotationArguments", "out", "x", "cosines", "sines")
GateGradientArguments = arguments("GateGradientArguments", "of_x", "of_y", "outer", "x", "y")
ACTIVATIONS: dict[ActivationName, Formula] = {
    "relu": relu,
    "relu2": lambda code, x: code.fmul(relu(code, x), relu(code, x)),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": lambda code, x: code.fmul(x, sigmoid(code, x)),
}
DERIVATIVES: dict[ActivationName, Formula] = {
    "relu": lambda code, x: code.select(
        code.fcmp_ordered(">", x, like(code, x, 0.0)), like(code, x, 1.0), like(code, x, 0.0)
    ),
    "relu2": lambda code, x: code.fmul(like(code, x, 2.0), relu(code, x)),
    "gelu": gelu_derivative,
    "gelu_tanh": gelu_tanh_derivative,
    "silu": silu_derivative,
}


@dataclass(frozen=True)
class NormForm:
    """The constants of an RMSNorm kernel for rows of x in `dtype`: x / sqrt(mean(x ** 2) + eps) * (weight + offset),
    written in `out_dtype`."""

    width: int
    dtype: str
    weight_dtype: str
    out_dtype: str
    eps: float
    offset: float

    def scale(self, code: Code, weight: Any, index: Any, read: Callable[..., Any]) -> Any:
        """Emit code for weight + offset at `index`, the scale of one element or of a vector of LANES elements; `weight`
        is the address of the weight, `read` the method of `Code` that reads one number or LANES."""
        scale = read(weight, self.weight_dtype, index)
        return code.fadd(scale, like(code, scale, self.offset)) if self.offset else scale


@cache
def rms_norm(norm: NormForm) -> Kernel:
    """Compile the kernel of an RMSNorm with the arguments NormArguments; threads divide the rows. The factors 1 /
    sqrt(...) of the rows are also written, in fp32, for the gradients."""
    width, dtype = norm.width, norm.dtype

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (row, _):
            start = code.mul(row, INT(width))
            squares = row_sum(code, given.x, dtype, start, width, lambda x: code.fmul(x, x))
            mean = code.fmul(squares, FLOAT(1 / width))
            factor = code.fdiv(FLOAT(1.0), root(code, code.fadd(mean, FLOAT(norm.eps))))
            code.put(factor, given.factors, "float32", row)
            for index, read in spans(code, width):
                value = read(given.x, dtype, code.add(start, index))
                value = code.fmul(value, like(code, value, factor))
                value = code.fmul(value, norm.scale(code, given.weight, index, read))
                code.put(value, given.out, norm.out_dtype, code.add(start, index))

    return callable_kernel(NormArguments, emit)


@cache
def rms_norm_gradient(norm: NormForm) -> Kernel:
    """Compile the kernel for the gradient of an RMSNorm with respect to x, with the arguments NormGradientArguments;
    threads divide the rows.

    `outer` is the gradient of the output, and `out` the gradient of x: r g - x r ** 3 mean(g x), where r is the row's
    factor and g is the gradient of the output times the scale.
    """
    width = norm.width

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (row, _):
            start, factor = code.mul(row, INT(width)), code.scalar(given.factors, "float32", row)

            def numbers(index: Any, read: Callable[..., Any]) -> tuple[Any, Any]:
                place = code.add(start, index)
                g = code.fmul(read(given.outer, norm.out_dtype, place), norm.scale(code, given.weight, index, read))
                return g, read(given.x, norm.dtype, place)

            mean = code.fmul(total(code, width, lambda *at: code.fmul(*numbers(*at))), FLOAT(1 / width))
            share = code.fneg(code.fmul(mean, code.fmul(factor, code.fmul(factor, factor))))
            for index, read in spans(code, width):
                g, x = numbers(index, read)
                value = code.fma(x, like(code, x, share), code.fmul(g, like(code, g, factor)))
                code.put(value, given.out, norm.dtype, code.add(start, index))

    return callable_kernel(NormGradientArguments, emit)


@cache
def rms_norm_weight_gradient(norm: NormForm) -> Kernel:
    """Compile the kernel for the gradient of an RMSNorm with respect to its weight, with the arguments
    NormWeightGradientArguments. Threads divide the columns: an item is LANES columns, or one of the remaining columns.

    `out` is the gradient of the weight in fp32, `outer` the gradient of the output.
    """
    width, blocks = norm.width, norm.width // LANES

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        def columns(begin: Any, read: Callable[..., Any], zero: Any) -> None:
            with code.loop(0, given.rows, 1, [zero]) as (row, sums):
                place = code.add(code.mul(row, INT(width)), begin)
                product = code.fmul(read(given.outer, norm.out_dtype, place), read(given.x, norm.dtype, place))
                factor = code.scalar(given.factors, "float32", row)
                sums[0] = code.fma(product, like(code, product, factor), sums[0])
            code.put(sums[0], given.out, "float32", begin)

        with code.loop(first, end) as (item, _):
            is_vector = code.icmp_signed("<", item, INT(blocks))
            with code.if_else(is_vector) as (vector, scalar):
                with vector:
                    columns(code.mul(item, INT(LANES)), code.floats, ZERO)
                with scalar:
                    columns(code.add(item, INT(blocks * (LANES - 1))), code.scalar, FLOAT(0.0))

    return callable_kernel(NormWeightGradientArguments, emit)


def column_items(width: int) -> int:
    """Return the number of work items (groups of LANES columns, then single columns) into which
    `rms_norm_weight_gradient` divides `width` columns."""
    return width // LANES + width % LANES


@cache
def rotation(heads: int, d_head: int, half: int, dtype: str) -> Kernel:
    """Compile the kernel that rotates queries or keys (B, T, heads, d_head) by their positions (rotary embedding), with
    the arguments RotationArguments; threads divide the tokens. `half` is the number of rotated pairs of elements in a
    head."""

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (token, _), code.loop(0, heads) as (head, _):
            angles = code.mul(token, INT(half))
            start = code.mul(code.add(code.mul(token, INT(heads)), head), INT(d_head))
            middle, rest = code.add(start, INT(half)), code.add(start, INT(2 * half))
            for index, read in spans(code, half):
                a, b = (read(given.x, dtype, code.add(place, index)) for place in (start, middle))
                cos, sin = (read(table, "float32", code.add(angles, index)) for table in (given.cosines, given.sines))
                code.put(code.fsub(code.fmul(a, cos), code.fmul(b, sin)), given.out, dtype, code.add(start, index))
                code.put(code.fadd(code.fmul(b, cos), code.fmul(a, sin)), given.out, dtype, code.add(middle, index))
            for index, read in spans(code, d_head - 2 * half):
                place = code.add(rest, index)
                code.put(read(given.x, dtype, place), given.out, dtype, place)

    return callable_kernel(RotationArguments, emit)


@cache
def gate(activation: ActivationName, dtype: str) -> Kernel:
    """Compile the kernel that writes activation(x) * y, elementwise, as in a gated feed-forward; its arguments are
    those of `operands(2)`: the addresses of the result, x and y. Threads divide the elements."""

    def formula(code: Code, x: Any, y: Any) -> Any:
        return code.fmul(code.rounded(ACTIVATIONS[activation](code, x), dtype), y)

    return callable_kernel(operands(2), elementwise(formula, [Layout((1,), (1,), dtype)] * 3))


@cache
def gate_gradient(activation: ActivationName, dtype: str) -> Kernel:
    """Compile the kernel for the gradients of activation(x) * y with respect to x and y, from `outer`, the gradient of
    the product. Its arguments are GateGradientArguments; threads divide the numbers."""

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        middle = code.sub(end, code.urem(code.sub(end, first), INT(LANES)))
        for start, stop, step, read in (first, middle, LANES, code.floats), (middle, end, 1, code.scalar):
            with code.loop(start, stop, step) as (index, _):
                outer, x, y = (read(each, dtype, index) for each in (given.outer, given.x, given.y))
                active = code.rounded(ACTIVATIONS[activation](code, x), dtype)
                inner = code.rounded(code.fmul(outer, y), dtype)
                code.put(code.fmul(outer, active), given.of_y, dtype, index)
                code.put(code.fmul(inner, DERIVATIVES[activation](code, x)), given.of_x, dtype, index)

    return callable_kernel(GateGradientArguments, emit)
