"""Code of AdamW: one pass over the memory of all tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from onward.kernels.llvm.code import INT, Code
from onward.kernels.llvm.compiler import Values, arguments, callable_kernel
from onward.kernels.llvm.elementwise import Value, like, numbers_between, root

BLOCK = 1024  # numbers of an item
AdamWArguments = arguments("AdamWArguments", "tensors", "factors", "count")
ADDRESSES = "weight", "gradient", "mean", "square", "numbers", "first"  # a row of `tensors`
FACTORS = "kept", "mean_share", "square_decay", "square_share", "rate", "root_factor", "eps"  # a row of `factors`


@cache
def adamw() -> Callable[..., None]:
    """Compile the kernel with the fields of AdamWArguments; an item is a block of BLOCK numbers of a tensor, the last
    one of a tensor may be shorter.

    `tensors` (count, ADDRESSES) in int64 are addresses of fp32 numbers, how many there are, and the item at which a
    tensor begins; `factors` (count, FACTORS) are in fp32. w = kept w - rate m / (root_factor sqrt(s) + eps), with the
    mean m += mean_share (g - m), and the mean of squares s = square_decay s + square_share g².
    """

    def emit(code: Code, given: Values, first: Value, end: Value) -> None:
        with code.loop(0, given.count) as (row, _):
            places = (code.add(code.mul(row, INT(len(ADDRESSES))), INT(i)) for i in range(len(ADDRESSES)))
            weight, gradient, mean, square, numbers, item = (code.scalar(given.tensors, "int64", p) for p in places)
            places = (code.add(code.mul(row, INT(len(FACTORS))), INT(i)) for i in range(len(FACTORS)))
            factors = [code.scalar(given.factors, "float32", place) for place in places]

            def bounded(value: Value) -> Value:
                """The index of the tensor's number at which an item of the kernel begins."""
                index = code.mul(code.sub(value, item), INT(BLOCK))
                index = code.select(code.icmp_signed("<", index, INT(0)), INT(0), index)
                return code.select(code.icmp_signed(">", index, numbers), numbers, index)

            for index, read in numbers_between(code, bounded(first), bounded(end)):
                w, g, m, s = (read(tensor, "float32", index) for tensor in (weight, gradient, mean, square))
                kept, mean_share, square_decay, square_share, rate, factor, eps = (like(code, w, f) for f in factors)
                m = code.fma(mean_share, code.fsub(g, m), m)
                s = code.fma(code.fmul(g, g), square_share, code.fmul(s, square_decay))
                update = code.fdiv(code.fmul(rate, m), code.fma(root(code, s), factor, eps))
                for value, tensor in (m, mean), (s, square), (code.fsub(code.fmul(w, kept), update), weight):
                    code.put(value, tensor, "float32", index)

    return callable_kernel(AdamWArguments, emit)
