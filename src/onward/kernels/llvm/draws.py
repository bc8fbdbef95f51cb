"""Code of the kernel that draws next tokens from logits in one pass, for `kernels/draws.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from onward.base.splitmix import GOLDEN, MULTIPLIERS
from onward.kernels.llvm.code import FLOAT, FLOATS, INT, LANES, Code
from onward.kernels.llvm.compiler import Emit, Values, arguments, callable_kernel
from onward.kernels.llvm.elementwise import exp, like
from onward.kernels.memory import Kernel

DOUBLE = ir.DoubleType()
HALF = LANES // 2
LONGS, DOUBLES = ir.VectorType(INT, HALF), ir.VectorType(DOUBLE, HALF)
LOWEST = -3e38  # the logit of a token that is not allowed
DrawArguments = arguments("DrawArguments", "tokens", "logits", "allowed", "factors", "seeds", "index", "vocab_size")


def emit(dtype: str, masked: bool) -> Emit:
    """Return the function that emits the code of the kernel that draws one token per row of logits. Its arguments are
    DrawArguments; threads divide the rows. `masked`: whether a mask of allowed tokens is given. `factors` (N,) are the
    inverse temperatures, 0 for the likeliest token. The token is -1 if the logit of an allowed token is not finite, or
    if no token is allowed.
    """

    def kernel(code: Code, given: Values, first: Any, end: Any) -> None:
        size = given.vocab_size
        full_end = code.sub(size, code.urem(size, INT(LANES)))
        with code.loop(first, end) as (row, _):
            start = code.mul(row, size)

            def logit(place: Any, vector: bool) -> tuple[Any, Any]:
                """Emit code for the logit of a token (LOWEST if it is not allowed), and for whether the token is
                allowed."""
                value = (code.floats if vector else code.scalar)(given.logits, dtype, code.add(start, place))
                if not masked:
                    return value, None
                byte = code.bytes(given.allowed, place) if vector else code.load(code.at(given.allowed, "int8", place))
                permitted = code.icmp_unsigned("!=", byte, ir.Constant(byte.type, None))
                return code.select(permitted, value, like(code, value, LOWEST)), permitted

            def scan(place: Any, values: list[Any], vector: bool) -> None:
                value, _ = logit(place, vector)
                values[0] = code.select(code.fcmp_ordered(">", value, values[0]), value, values[0])
                values[1] = code.fadd(values[1], code.fmul(value, like(code, value, 0.0)))  # NaN unless finite

            begin = [ir.Constant(FLOATS, [LOWEST] * LANES), ir.Constant(FLOATS, [0.0] * LANES)]
            with code.loop(0, full_end, LANES, begin) as (place, values):
                scan(place, values, True)
            lanes = [code.extract_element(values[0], ir.IntType(32)(i)) for i in range(LANES)]
            while len(lanes) > 1:
                pairs = list(zip(lanes[::2], lanes[1::2]))
                lanes = [code.select(code.fcmp_ordered(">", a, b), a, b) for a, b in pairs]
            with code.loop(full_end, size, 1, [lanes[0], code.sum(values[1])]) as (place, values):
                scan(place, values, False)
            top, finite = values[0], code.fcmp_ordered("==", values[1], FLOAT(0.0))
            finite = code.and_(finite, code.fcmp_ordered(">", top, FLOAT(LOWEST)))
            factor = code.scalar(given.factors, "float32", row)
            result = code.alloca(INT)
            code.store(INT(-1), result)
            with code.if_then(finite), code.if_else(code.fcmp_ordered("==", factor, FLOAT(0.0))) as (greedy, random):
                with greedy:
                    code.store(size, result)

                    def note(place: Any) -> None:
                        """Keep the index of the first token with the greatest logit."""
                        equal = code.fcmp_ordered("==", logit(place, False)[0], top)
                        better = code.and_(equal, code.icmp_signed("<", place, code.load(result)))
                        code.store(code.select(better, place, code.load(result)), result)

                    with code.loop(0, full_end, LANES) as (place, _):
                        equal = code.fcmp_ordered("==", logit(place, True)[0], code.repeat(top))
                        some = code.icmp_unsigned("!=", code.bitcast(equal, ir.IntType(LANES)), ir.IntType(LANES)(0))
                        with code.if_then(some), code.loop(place, code.add(place, INT(LANES))) as (lane, _):
                            note(lane)
                    with code.loop(full_end, size) as (place, _):
                        note(place)
                with random:
                    state = scramble(code, code.add(code.scalar(given.seeds, "int64", row), INT(GOLDEN)))
                    state = code.add(state, code.mul(code.scalar(given.index, "int64", row), INT(GOLDEN)))
                    draw(code, scramble(code, scramble(code, state)), logit, top, factor, full_end, size, result)
            code.store(code.load(result), code.at(given.tokens, "int64", row))

    return kernel


def draw(
    code: Code,
    state: Any,
    logit: Callable[..., Any],
    top: Any,
    factor: Any,
    full_end: Any,
    size: Any,
    result: Any,
) -> None:
    """Emit code that draws a token as `kernels.draws.draw` does, the one with the greatest ratio p / e, and stores it
    at `result`.

    `state` is the hash of the row's seed and index, `logit(index, vector)` reads logits, `top` is the greatest logit
    and `factor` the inverse temperature; `size` is the number of tokens, and the first `full_end` tokens are read LANES
    at a time.
    """
    best = code.alloca(DOUBLE)
    code.store(DOUBLE(0.0), best)
    log = code.module.globals.get("log") or ir.Function(code.module, ir.FunctionType(DOUBLE, [DOUBLE]), "log")

    def probability(place: Any, vector: bool) -> Any:
        """Emit code for the unnormalized probability of the tokens; normalization would not change the draw."""
        value, permitted = logit(place, vector)
        difference = code.fsub(value, like(code, value, top))
        p = exp(code, code.fmul(difference, like(code, difference, factor)))
        return p if permitted is None else code.select(permitted, p, like(code, p, 0.0))

    def number(place: Any) -> Any:
        """Emit code for the uniform random number of each token, between 0 and 1."""
        constants = (lambda n: ir.Constant(place.type, [n] * HALF)) if place.type == LONGS else INT
        kind = DOUBLES if place.type == LONGS else DOUBLE
        repeated = (lambda x: ir.Constant(kind, [x] * HALF)) if kind == DOUBLES else DOUBLE
        base = spread(code, state, HALF) if place.type == LONGS else state
        bits = scramble(code, code.add(base, code.mul(place, constants(GOLDEN))))
        unit = code.uitofp(code.lshr(bits, constants(12)), kind)
        return code.fmul(code.fadd(unit, repeated(0.5)), repeated(2.0**-52))

    def one(place: Any) -> None:
        p = code.fpext(probability(place, False), DOUBLE)
        ratio = code.fdiv(p, code.fneg(code.call(log, [number(place)])))
        before = code.load(best)
        better = code.fcmp_ordered(">", ratio, before)
        code.store(code.select(better, ratio, before), best)
        code.store(code.select(better, place, code.load(result)), result)

    with code.loop(0, full_end, LANES) as (place, _):
        p, ratio = probability(place, True), spread(code, code.load(best), HALF)
        hits = []
        for part in range(2):
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), HALF), list(range(part * HALF, (part + 1) * HALF)))
            share = code.fdiv(
                code.fpext(code.shuffle_vector(p, ir.Constant(FLOATS, ir.Undefined), lanes), DOUBLES), ratio
            )
            offsets = ir.Constant(LONGS, list(range(part * HALF, (part + 1) * HALF)))
            u = number(code.add(spread(code, place, HALF), offsets))
            bound = code.fsub(ir.Constant(DOUBLES, [1.0] * HALF), share)
            hits.append(code.bitcast(code.fcmp_ordered(">=", u, bound), ir.IntType(HALF)))
        hit = code.icmp_unsigned("!=", code.or_(*hits), ir.IntType(HALF)(0))
        with code.if_then(hit), code.loop(place, code.add(place, INT(LANES))) as (lane, _):
            one(lane)
    with code.loop(full_end, size) as (place, _):
        one(place)


def scramble(code: Code, x: Any) -> Any:
    """Emit code that mixes the bits of x, an int64 or a vector of them: the output function of the random number
    generator SplitMix64."""
    constants = (lambda n: ir.Constant(x.type, [n] * HALF)) if x.type == LONGS else INT
    for bits, factor in zip((30, 27), MULTIPLIERS):
        x = code.mul(code.xor(x, code.lshr(x, constants(bits))), constants(factor))
    return code.xor(x, code.lshr(x, constants(31)))


def spread(code: Code, value: Any, count: int) -> Any:
    """Emit code for a vector with `count` copies of the integer or fp number `value`."""
    empty = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    first = code.insert_element(empty, value, ir.IntType(32)(0))
    return code.shuffle_vector(first, empty, ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count))


@cache
def draws(dtype: str, masked: bool) -> Kernel:
    """Compile the kernel that draws one token per row of logits; `masked`: whether a mask of allowed tokens is given.
    Return it as a function whose arguments are the fields of DrawArguments, the number of rows, and the number of
    threads."""
    return callable_kernel(DrawArguments, emit(dtype, masked))
