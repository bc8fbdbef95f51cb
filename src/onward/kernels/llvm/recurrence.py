"""Code of the kernels that advance the states of recurrent layers in the memory of a cache: the recurrence of
`model/recurrent/recurrence.py`, and the convolution before it.

The state of a row after the token at position p is in slot p % slots; a row begins with zeros at position 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onward.kernels.llvm.batches import column_ranges
from onward.kernels.llvm.code import FLOAT, INT, LANES, Code
from onward.kernels.llvm.compiler import Emit, Values, arguments
from onward.kernels.llvm.elementwise import like, spans
from onward.kernels.llvm.units import ZERO

RecurrenceArguments = arguments(
    "RecurrenceArguments", "state", "slots", "positions", "tokens", "y", "q", "k", "v", "decay", "beta"
)
ConvolutionArguments = arguments("ConvolutionArguments", "state", "slots", "positions", "tokens", "y", "x", "weight")


@dataclass(frozen=True)
class RecurrenceForm:
    """The constants for which a recurrence kernel is compiled."""

    heads: int  # number of value heads
    shared: int  # number of value heads that share keys and queries
    d_key: int
    d_value: int
    decays: int  # decays per head: 1 or d_key
    beta: bool  # whether the state's value for the key is subtracted first (delta rule)


def slots_of(code: Code, given: Values, row: Any, token: Any) -> tuple[Any, Any, Any]:
    """Emit code for the indices of the states (row, slot) before and after a token, and for whether the row begins with
    this token, from a state of zeros."""
    position = code.scalar(given.positions, "int64", code.add(code.mul(row, given.tokens), token))
    first = code.mul(row, given.slots)
    before = code.add(first, code.urem(code.sub(code.add(position, given.slots), INT(1)), given.slots))
    return before, code.add(first, code.urem(position, given.slots)), code.icmp_signed("==", position, INT(0))


def recurrence(form: RecurrenceForm) -> Emit:
    """Return the function that emits the code of a kernel for the recurrence over T tokens, all in fp32: queries and
    keys (B, heads / shared, T, d_key), values and outputs y (B, heads, T, d_value), factors `decay` of the states (B,
    heads, T, decays), beta (B, heads, T); states (rows, slots, heads, d_key, d_value). The kernel's arguments are
    RecurrenceArguments, where `tokens` is T; threads divide the heads of all rows."""
    width, size = form.d_value, form.d_key * form.d_value

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (item, _), code.loop(0, given.tokens) as (token, _):
            row, head = code.udiv(item, INT(form.heads)), code.urem(item, INT(form.heads))
            *slots, begins = slots_of(code, given, row, token)
            before, after = (code.mul(code.add(code.mul(s, INT(form.heads)), head), INT(size)) for s in slots)
            of_item = code.add(code.mul(item, given.tokens), token)
            of_key = code.add(code.mul(code.udiv(item, INT(form.shared)), given.tokens), token)
            keys, values = code.mul(of_key, INT(form.d_key)), code.mul(of_item, INT(width))
            decays = code.mul(of_item, INT(form.decays))

            def decay(index: Any) -> Any:
                place = code.add(decays, index) if form.decays > 1 else decays
                return code.scalar(given.decay, "float32", place)

            for begin, stop, columns in column_ranges(code, INT(width)):
                read, zero = (code.floats, ZERO) if columns > 1 else (code.scalar, FLOAT(0.0))
                lanes = range(0, columns, LANES)
                with code.loop(begin, stop, columns) as (column, _):
                    start = code.add(before, column)
                    places = [code.add(code.add(values, column), INT(lane)) for lane in lanes]
                    new = [read(given.v, "float32", place) for place in places]
                    if form.beta:
                        with code.loop(0, form.d_key, 1, [zero] * len(lanes)) as (index, sums):
                            key = code.scalar(given.k, "float32", code.add(keys, index))
                            factor = like(code, zero, code.fmul(key, decay(index)))
                            for i, lane in enumerate(lanes):
                                place = code.add(code.add(start, code.mul(index, INT(width))), INT(lane))
                                state = code.select(begins, zero, read(given.state, "float32", place))
                                sums[i] = code.fma(factor, state, sums[i])
                        beta = like(code, zero, code.scalar(given.beta, "float32", of_item))
                        new = [code.fsub(value, code.fmul(beta, total)) for value, total in zip(new, sums)]
                    with code.loop(0, form.d_key, 1, [zero] * len(lanes)) as (index, sums):
                        step = code.add(code.mul(index, INT(width)), column)
                        key, query = (code.scalar(t, "float32", code.add(keys, index)) for t in (given.k, given.q))
                        key, query, kept = (like(code, zero, number) for number in (key, query, decay(index)))
                        for i, lane in enumerate(lanes):
                            place = code.add(step, INT(lane))
                            state = read(given.state, "float32", code.add(before, place))
                            state = code.fmul(kept, code.select(begins, zero, state))
                            state = code.fma(key, new[i], state)
                            code.put(state, given.state, "float32", code.add(after, place))
                            sums[i] = code.fma(query, state, sums[i])
                    for place, total in zip(places, sums):
                        code.put(total, given.y, "float32", place)

    return emit


def convolution(width: int, taps: int, dtype: str) -> Emit:
    """Return the function that emits the code of a kernel for the causal convolution of `width` channels of x (B, T,
    width) with a weight (taps, width) in fp32, newest token last; the outputs y are in fp32. States are the last tokens
    of x, (rows, slots, taps - 1, width) in its dtype. The kernel's arguments are ConvolutionArguments, where `tokens`
    is T; threads divide the rows."""

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (row, _), code.loop(0, given.tokens) as (token, _):
            *slots, begins = slots_of(code, given, row, token)
            before, after = (code.mul(slot, INT((taps - 1) * width)) for slot in slots)
            place = code.mul(code.add(code.mul(row, given.tokens), token), INT(width))
            for index, read in spans(code, width):
                new = read(given.x, dtype, code.add(place, index))
                earlier = [
                    read(given.state, dtype, code.add(code.add(before, INT(tap * width)), index))
                    for tap in range(taps - 1)
                ]
                inputs = [*(code.select(begins, like(code, new, 0.0), number) for number in earlier), new]
                total = like(code, new, 0.0)
                for tap, number in enumerate(inputs):
                    weight = read(given.weight, "float32", code.add(INT(tap * width), index))
                    total = code.fma(number, weight, total)
                code.put(total, given.y, "float32", code.add(place, index))
                for tap, number in enumerate(inputs[1:]):
                    code.put(number, given.state, dtype, code.add(code.add(after, INT(tap * width)), index))

    return emit
