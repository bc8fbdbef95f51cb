"""Norms, rotations and gates of many tokens, each as one kernel. Numbers are rounded where PyTorch's operations do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from onward.model.config import Activation
from onward.model.kernels.compiler import FLOAT, INT, Code, Emit, callable_kernel
from onward.model.kernels.elementwise import (
    Formula,
    Layout,
    clamp,
    elementwise,
    gelu,
    gelu_tanh,
    like,
    root,
    row_sum,
    sigmoid,
    spans,
)

ACTIVATIONS: dict[Activation, Formula] = {
    "relu": lambda code, x: clamp(code, x, 0.0, None),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": lambda code, x: code.fmul(x, sigmoid(code, x)),
}


@cache
def rms_norm(width: int, dtype: str, weight_dtype: str, eps: float, offset: float) -> Callable[..., None]:
    """The kernel `(out, x, weight, rows, threads)` of x / sqrt(mean(x ** 2) + eps) * (weight + offset)."""

    def emit(code: Code, arguments: Sequence[Any], first: Any, end: Any) -> None:
        out, source, weight = arguments
        with code.loop(first, end) as (row, _):
            start = code.mul(row, INT(width))
            squares = row_sum(code, source, dtype, start, width, lambda x: code.fmul(x, x))
            mean = code.fmul(squares, FLOAT(1 / width))
            factor = code.fdiv(FLOAT(1.0), root(code, code.fadd(mean, FLOAT(eps))))
            for index, read in spans(code, width):
                value = read(source, dtype, code.add(start, index))
                scale = read(weight, weight_dtype, index)
                scale = code.fadd(scale, like(code, scale, offset)) if offset else scale
                value = code.fmul(code.fmul(value, like(code, value, factor)), scale)
                code.put(value, out, dtype, code.add(start, index))

    return callable_kernel(3, emit)


@cache
def rotation(heads: int, d_head: int, half: int, dtype: str) -> Callable[..., None]:
    """The kernel `(out, x, cosines, sines, tokens, threads)` of `positions.rotate`."""

    def emit(code: Code, arguments: Sequence[Any], first: Any, end: Any) -> None:
        out, source, cosines, sines = arguments
        with code.loop(first, end) as (token, _), code.loop(0, heads) as (head, _):
            angles = code.mul(token, INT(half))
            start = code.mul(code.add(code.mul(token, INT(heads)), head), INT(d_head))
            middle, rest = code.add(start, INT(half)), code.add(start, INT(2 * half))
            for index, read in spans(code, half):
                a, b = (read(source, dtype, code.add(place, index)) for place in (start, middle))
                cos, sin = (read(table, "float32", code.add(angles, index)) for table in (cosines, sines))
                code.put(code.fsub(code.fmul(a, cos), code.fmul(b, sin)), out, dtype, code.add(start, index))
                code.put(code.fadd(code.fmul(b, cos), code.fmul(a, sin)), out, dtype, code.add(middle, index))
            for index, read in spans(code, d_head - 2 * half):
                place = code.add(rest, index)
                code.put(read(source, dtype, place), out, dtype, place)

    return callable_kernel(4, emit)


@cache
def gate(activation: Activation, dtype: str) -> Callable[..., None]:
    """The kernel `(out, x, y, numbers, threads)` of activation(x) * y."""

    def formula(code: Code, x: Any, y: Any) -> Any:
        return code.fmul(code.rounded(ACTIVATIONS[activation](code, x), dtype), y)

    emit: Emit = elementwise(formula, [Layout((1,), (1,), dtype)] * 3)
    return callable_kernel(3, emit)
