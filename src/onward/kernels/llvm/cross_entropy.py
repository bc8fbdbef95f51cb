"""Code of the kernel for the cross-entropy of rows of logits and its gradient."""

from __future__ import annotations

from functools import cache
from typing import Any

from onward.kernels.llvm.code import FLOAT, FLOATS, INT, LANES, Code
from onward.kernels.llvm.compiler import Values, arguments, callable_kernel
from onward.kernels.llvm.draws import LOWEST
from onward.kernels.llvm.elementwise import by_element, exp, like, row_sum, spans
from onward.kernels.memory import Kernel

CrossEntropyArguments = arguments("CrossEntropyArguments", "losses", "gradient", "logits", "targets")


@cache
def cross_entropy(width: int, dtype: str, ignored: int, with_gradient: bool = True) -> Kernel:
    """Compile the cross-entropy kernel with the arguments CrossEntropyArguments, for logits (N, width) in `dtype`;
    threads divide the rows. For each row it writes the loss and, if `with_gradient`, the gradient of the losses' sum,
    in the dtype of the logits; both are 0 where the target is `ignored`."""

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        gradient, logits = given.gradient, given.logits
        with code.loop(first, end) as (row, _):
            start, target = code.mul(row, INT(width)), code.scalar(given.targets, "int64", row)
            counts = code.icmp_signed("!=", target, INT(ignored))
            weight = code.select(counts, FLOAT(1.0), FLOAT(0.0))
            place = code.add(start, code.select(counts, target, INT(0)))
            top = greatest(code, logits, dtype, start, width)

            def power(value: Any) -> Any:
                return exp(code, code.fsub(value, like(code, value, top)))

            total = row_sum(code, logits, dtype, start, width, power)
            logit = code.scalar(logits, dtype, place)
            if with_gradient:
                factor = code.fdiv(weight, total)
                for index, read in spans(code, width):
                    p = power(read(logits, dtype, code.add(start, index)))
                    code.put(code.fmul(p, like(code, p, factor)), gradient, dtype, code.add(start, index))
                code.put(code.fsub(code.fmul(power(logit), factor), weight), gradient, dtype, place)
            loss = code.fsub(code.fadd(top, by_element(code, "logf", total)), logit)
            code.put(code.select(counts, loss, FLOAT(0.0)), given.losses, "float32", row)

    return callable_kernel(CrossEntropyArguments, emit)


def greatest(code: Code, source: Any, dtype: str, start: Any, width: int) -> Any:
    """Emit code for the greatest of `width` numbers of the tensor `source`, in `dtype`, from index `start` on."""
    full_end = width - width % LANES

    def larger(a: Any, b: Any) -> Any:
        return code.select(code.fcmp_ordered(">", a, b), a, b)

    with code.loop(0, full_end, LANES, [like(code, FLOATS([0.0] * LANES), LOWEST)]) as (index, tops):
        tops[0] = larger(code.floats(source, dtype, code.add(start, index)), tops[0])
    lanes = code.declare("llvm.vector.reduce.fmax", FLOAT, [FLOATS], FLOATS)
    with code.loop(full_end, width, 1, [code.call(lanes, [tops[0]])]) as (index, tops):
        tops[0] = larger(code.scalar(source, dtype, code.add(start, index)), tops[0])
    return tops[0]
