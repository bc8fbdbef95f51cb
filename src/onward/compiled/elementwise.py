"""Lowering of elementwise operations and copies: translate each to a call of a kernel generated from its formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onward.compiled.calls import DTYPES, Call
from onward.compiled.interface import NotCompilable
from onward.compiled.needed import name_of
from onward.compiled.recording import Operation
from onward.kernels.llvm import elementwise
from onward.kernels.llvm.code import Code
from onward.kernels.llvm.elementwise import Formula, Layout, clamp, like, merged
from onward.kernels.memory import strided_address


def target_of(operation: Operation) -> Tensor:
    result = operation.arguments[0] if operation.function._schema.is_mutable else operation.result
    return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]


def each(key: tuple[Any, ...], formula: Formula, out: Tensor, operands: Sequence[Tensor]) -> Call:
    """Return the call of an elementwise kernel that writes formula(*operands) to `out`; `formula` emits the LLVM code
    of one element or vector. `key` identifies the formula, so that equal kernels are compiled once. Raises
    NotCompilable for a dtype without a kernel."""
    if any(t.dtype not in DTYPES for t in operands):
        raise NotCompilable(f"{key[0]} of {operands[0].dtype}")
    layouts = merged([Layout.of(out), *(Layout.of(t, out.shape) for t in operands)])
    structure, addresses = elementwise.operands(len(operands)), [strided_address(t) for t in (out, *operands)]
    form = tuple((layout.shape[1:], layout.strides, layout.dtype) for layout in layouts)
    arguments = structure(*addresses, items=layouts[0].shape[0])
    return Call((*key, form), elementwise.elementwise(formula, layouts), arguments)


def binary(of_floats: str, of_integers: str | None) -> Callable[[Operation], list[Call]]:
    """Return a function that lowers an operation of two operands, one of which may be a number. `of_floats` and
    `of_integers` name methods of `Code`; `of_integers` is None if integers are not supported."""

    def lowered(operation: Operation) -> list[Call]:
        out, pair = target_of(operation), operation.arguments[:2]
        if name_of(operation) == "rsub":
            pair = pair[1], pair[0]
        operands = [x for x in pair if isinstance(x, Tensor)]
        integral = out.dtype == torch.int64
        if operation.options.get("alpha", 1) != 1 or operation.options.get("rounding_mode"):
            raise NotCompilable(name_of(operation))
        if any((x.dtype == torch.int64) != integral for x in operands) or (integral and of_integers is None):
            raise NotCompilable(f"{name_of(operation)} of integers")

        def formula(code: Code, *values: Any) -> Any:
            left = iter(values)
            both = [next(left) if isinstance(x, Tensor) else like(code, values[0], x) for x in pair]
            return getattr(code, of_integers if integral and of_integers else of_floats)(*both)

        return [
            each((operation.function, *(None if isinstance(x, Tensor) else x for x in pair)), formula, out, operands)
        ]

    return lowered


def unary(formula: Callable[..., Any], *defaults: Any) -> Callable[[Operation], list[Call]]:
    """Return a function that lowers an elementwise operation of one tensor by the formula of one element; the formula
    also takes the numeric arguments after the tensor."""

    def lowered(operation: Operation) -> list[Call]:
        given = [*operation.arguments[1:], *defaults[len(operation.arguments) - 1 :]]
        x = operation.arguments[0]
        if not isinstance(x, Tensor) or any(isinstance(number, Tensor) for number in given):
            raise NotCompilable(f"{name_of(operation)} with a tensor as its parameter")
        key = operation.function, *given, *operation.options.values()
        return [each(key, lambda code, value: formula(code, value, *given), target_of(operation), [x])]

    return lowered


def power(code: Code, x: Any, exponent: float) -> Any:
    if exponent != 2:
        raise NotCompilable(f"a power of {exponent}")
    return code.fmul(x, x)


def sign(code: Code, x: Any) -> Any:
    zero, one, minus = (like(code, x, number) for number in (0.0, 1.0, -1.0))
    below = code.select(code.fcmp_ordered("<", x, zero), minus, zero)
    return code.select(code.fcmp_ordered(">", x, zero), one, below)


def convert(operation: Operation) -> list[Call]:
    out = target_of(operation)
    source = operation.arguments[1] if name_of(operation) == "copy_" else operation.arguments[0]
    if out.dtype == torch.int64 and source.dtype != torch.int64:
        raise NotCompilable("a conversion to integers")
    to_float = source.dtype == torch.int64 != out.dtype
    formula = (lambda code, x: code.sitofp(x, elementwise.FLOAT)) if to_float else (lambda code, x: x)
    return [each(("copy", to_float), formula, out, [source])]


def joined(operation: Operation) -> list[Call]:
    parts, dim = operation.arguments[0], operation.arguments[1] if len(operation.arguments) > 1 else 0
    if name_of(operation) == "stack":
        targets = operation.result.unbind(dim)
    else:
        targets = operation.result.split([part.size(dim) for part in parts], dim)
    return [copied(part, out) for out, part in zip(targets, parts) if part.numel()]


def copied(source: Tensor, out: Tensor) -> Call:
    return each(("copy", False), lambda code, x: x, out, [source])


def rows_of(operation: Operation) -> list[Call]:
    numbers, number, x, y = operation.arguments

    def formula(code: Code, of_row: Any, chosen: Any, other: Any) -> Any:
        return code.select(code.fcmp_ordered("==", of_row, like(code, of_row, float(number))), chosen, other)

    return [each((operation.function, number), formula, operation.result, [numbers, x, y])]


def softplus(operation: Operation) -> list[Call]:
    if operation.arguments[1:] or operation.options:
        raise NotCompilable("a softplus with other options")
    return unary(elementwise.softplus)(operation)


def gelu(operation: Operation) -> list[Call]:
    approximate = operation.options.get("approximate", "none") == "tanh"
    return unary(elementwise.gelu_tanh if approximate else elementwise.gelu)(operation)


ELEMENTWISE: dict[str, Callable[[Operation], list[Call]]] = {
    "add": binary("fadd", "add"),
    "sub": binary("fsub", "sub"),
    "rsub": binary("fsub", "sub"),
    "mul": binary("fmul", "mul"),
    "div": binary("fdiv", None),
    "minimum": binary("fmin", None),
    "pow": unary(power),
    "neg": unary(lambda code, x: code.fneg(x)),
    "rsqrt": unary(lambda code, x: code.fdiv(like(code, x, 1.0), elementwise.root(code, x))),
    "sign": unary(sign),
    "relu": unary(elementwise.relu),
    "clamp": unary(clamp, None, None),
    "hardtanh": unary(clamp, -1.0, 1.0),
    "softplus": softplus,
    "sigmoid": unary(elementwise.sigmoid),
    "silu": unary(lambda code, x: code.fmul(x, elementwise.sigmoid(code, x))),
    "tanh": unary(elementwise.tanh),
    "gelu": gelu,
    "exp": unary(elementwise.exp),
    "expm1": unary(lambda code, x: elementwise.by_element(code, "expm1f", x)),
    "log": unary(lambda code, x: elementwise.by_element(code, "logf", x)),
    "floor": unary(lambda code, x: elementwise.by_element(code, "floorf", x)),
    "cos": unary(lambda code, x: elementwise.by_element(code, "cosf", x)),
    "sin": unary(lambda code, x: elementwise.by_element(code, "sinf", x)),
    "rows_of": rows_of,
    "_to_copy": convert,
    "clone": convert,
    "copy": convert,
    "cat": joined,
    "stack": joined,
}
