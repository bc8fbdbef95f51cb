"""Attention of the tokens of a call over a contiguous or a paged cache, which reads the visible positions only.

In a contiguous cache, position p of row b is in slot p % S of the row; in a paged one, S is the size of a block, and
position p is in slot p % S of block table[b, p // S]. `table` has P columns, and is 0 for a contiguous cache.
Shapes: B rows, T tokens in a call, S slots, H heads, K key/value heads, G = H / K, E d_head, F width of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from onward.kernels.llvm.compiler import FLOAT, FLOATS, INT, LANES, Code, Emit, callable_kernel
from onward.kernels.llvm.elementwise import exp, like, tanh
from onward.kernels.llvm.products import Matrix, least, tile
from onward.kernels.llvm.units import shuffle, sums, unit_for


def write(width: int, dtype: str, paged: bool) -> Emit:
    """The kernel `(entry, vectors, positions, T, S, table, P)` that writes the vectors (B, T, width) of the tokens at
    `positions` (B, T) to the slots of an entry (B, S, width) or, paged, (blocks, S, width); an item is a token."""

    def emit(code: Code, arguments: Sequence[Any], first: Any, end: Any) -> None:
        entry, vectors, positions, tokens, slots, table, columns = arguments
        with code.loop(first, end) as (token, _):
            position = code.scalar(positions, "int64", token)
            block = row = code.udiv(token, tokens)
            if paged:
                block = block_of(code, table, columns, row, code.udiv(position, slots))
            slot = code.add(code.mul(block, slots), code.urem(position, slots))
            target, source = code.mul(slot, INT(width)), code.mul(token, INT(width))
            for begin, stop, count in (0, width - width % LANES, LANES), (width - width % LANES, width, 1):
                read = code.floats if count > 1 else code.scalar
                with code.loop(begin, stop, count) as (index, _):
                    code.put(read(vectors, dtype, code.add(source, index)), entry, dtype, code.add(target, index))

    return emit


def block_of(code: Code, table: Any, columns: Any, row: Any, index: Any) -> Any:
    """The block of a row in this column of the table."""
    return code.scalar(table, "int64", code.add(code.mul(row, columns), index))


@dataclass(frozen=True)
class Options:
    """Attention to the last `window` positions (0: all), a scale, a cap of the scores, and sinks or none."""

    window: int
    scale: float
    softcap: float | None
    sinks: bool


AHEAD = 32  # keys and values are prefetched this many before they are read
LINE = {"float32": 16, "bfloat16": 32}  # numbers in a line of memory
KEYS = 4  # keys whose scores are computed together, with up to as many heads


def attend(heads: int, kv_heads: int, d_head: int, d_value: int, dtype: str, options: Options, paged: bool) -> Emit:
    """The kernel `(y, q, k, v, sinks, positions, B * T, T, S, R, scratch, L, table, P)`; an item is a key/value head
    and token.

    q (B, T, H, E), k (B or blocks, S, K, E), v (B or blocks, S, K, F), sinks (H,), positions (B, T), y (B, T, H, F).
    Rows of a contiguous cache are R slots apart. `scratch` has L floats for each thread and each of G, L being at least
    the greatest number of visible positions. A token sees positions up to its own. The visible ones are in runs of
    slots: one or two in a contiguous cache, one in each block of a paged one.
    """
    group, unit = heads // kv_heads, unit_for(dtype)

    def emit(code: Code, arguments: Sequence[Any], first: Any, end: Any) -> None:
        y, q, k, v, sink_scores, positions, queries, tokens, slots, row_slots, scratch, length, table, columns = (
            arguments
        )
        weights = [code.mul(code.add(code.mul(code.thread, INT(group)), INT(g)), length) for g in range(group)]
        with code.loop(first, end) as (item, _):
            query, kv_head = code.urem(item, queries), code.udiv(item, queries)
            row, position = code.udiv(query, tokens), code.scalar(positions, "int64", query)
            count = code.add(position, INT(1))
            if options.window:
                count = least(code, count, INT(options.window))
            earliest = code.sub(code.add(position, INT(1)), count)
            begin, column = code.urem(earliest, slots), code.udiv(earliest, slots)
            until_end = least(code, count, code.sub(slots, begin))
            after = code.sub(code.udiv(position, slots), column)  # paged: blocks after the first one
            head = code.add(code.mul(query, INT(heads)), code.mul(kv_head, INT(group)))

            @contextmanager
            def runs(width: int, carried: Sequence[Any]) -> Iterator[tuple[Any, Any, Any, list[Any]]]:
                """For each run of slots: the index of its first visible position, their number, the place of the first
                vector of this width, and carried values."""
                with code.loop(0, code.add(after, INT(1)) if paged else 2, 1, carried) as (run, values):
                    initial = code.icmp_signed("==", run, INT(0))
                    offset = code.add(until_end, code.mul(code.sub(run, INT(1)), slots))
                    offset = code.select(initial, INT(0), offset)
                    size = code.select(initial, until_end, least(code, slots, code.sub(count, offset)))
                    start = code.mul(row, row_slots)
                    if paged:
                        start = code.mul(block_of(code, table, columns, row, code.add(column, run)), slots)
                    slot = code.add(start, code.select(initial, begin, INT(0)))
                    place = code.mul(code.add(code.mul(slot, INT(kv_heads)), kv_head), INT(width))
                    yield offset, size, place, values

            def fetch(matrix: Any, size: int, width: int, at: Any, keys: int) -> None:
                """Prefetch the vectors that are read AHEAD keys later: those of the other heads lie between them."""
                for key in range(AHEAD, AHEAD + keys):
                    for start in range(0, size, LINE[dtype]):
                        code.prefetch(code.at(matrix, dtype, code.add(at, INT(key * kv_heads * width + start))))

            def score(part: range, keys: int, at: Any, index: Any) -> Any:
                """Write the scores of some heads and the keys from a place on; returns them in a vector."""
                x = [code.mul(code.add(head, INT(g)), INT(d_head)) for g in part]
                places = [code.add(at, INT(i * kv_heads * d_head)) for i in range(keys)]
                totals = sums(code, tile(code, unit, Matrix(q, dtype), x, Matrix(k, dtype), places, INT(d_head)))
                totals = code.fmul(totals, like(code, totals, options.scale))
                if options.softcap is not None:
                    capped = tanh(code, code.fmul(totals, like(code, totals, 1 / options.softcap)))
                    totals = code.fmul(capped, like(code, totals, options.softcap))
                for i, g in enumerate(part):
                    numbers = shuffle(code, range(i * keys, (i + 1) * keys), totals)
                    code.put(numbers, scratch, "float32", code.add(weights[g], index))
                return totals

            greatest = [FLOAT(float("-inf"))] * group
            lowest = ir.Constant(FLOATS, [float("-inf")] * LANES)
            parts = [range(g, min(g + KEYS, group)) for g in range(0, group, KEYS)]
            with runs(d_head, [lowest] * (2 * len(parts))) as (offset, size, place, peaks):
                whole = code.sub(size, code.urem(size, INT(KEYS)))
                for i, (start, stop, keys) in enumerate(((INT(0), whole, KEYS), (whole, size, 1))):
                    with code.loop(start, stop, keys, peaks[i::2]) as (index, found):
                        at = code.add(place, code.mul(index, INT(kv_heads * d_head)))
                        fetch(k, d_head, d_head, at, keys)
                        for n, part in enumerate(parts):
                            totals = score(part, keys, at, code.add(offset, index))
                            more = code.fcmp_unordered(">", totals, found[n])
                            found[n] = code.select(more, totals, found[n])
                    peaks[i::2] = found
            for n, part in enumerate(parts):
                for keys, peak in (KEYS, peaks[2 * n]), (1, peaks[2 * n + 1]):
                    for i, g in enumerate(part):
                        for lane in range(i * keys, (i + 1) * keys):
                            number = code.extract_element(peak, ir.IntType(32)(lane))
                            more = code.fcmp_unordered(">", number, greatest[g])
                            greatest[g] = code.select(more, number, greatest[g])
            if options.sinks:
                for g in range(group):
                    sink = code.scalar(sink_scores, dtype, code.urem(code.add(head, INT(g)), INT(heads)))
                    greatest[g] = code.select(code.fcmp_unordered(">", sink, greatest[g]), sink, greatest[g])
            factors = []
            vectors = code.sub(count, code.urem(count, INT(LANES)))
            for g in range(group):
                zero, peak = ir.Constant(FLOATS, [0.0] * LANES), code.repeat(greatest[g])
                with code.loop(0, vectors, LANES, [zero]) as (index, totals):
                    where = code.add(weights[g], index)
                    value = exp(code, code.fsub(code.floats(scratch, "float32", where), peak))
                    code.put(value, scratch, "float32", where)
                    totals[0] = code.fadd(totals[0], value)
                with code.loop(vectors, count, 1, [code.sum(totals[0])]) as (index, totals):
                    where = code.add(weights[g], index)
                    value = exp(code, code.fsub(code.scalar(scratch, "float32", where), greatest[g]))
                    code.put(value, scratch, "float32", where)
                    totals[0] = code.fadd(totals[0], value)
                total = totals[0]
                if options.sinks:
                    sink = code.scalar(sink_scores, dtype, code.urem(code.add(head, INT(g)), INT(heads)))
                    total = code.fadd(total, exp(code, code.fsub(sink, greatest[g])))
                factors.append(code.fdiv(FLOAT(1.0), total))
            for start, width, lanes in pieces(d_value):
                zero = ir.Constant(FLOATS, [0.0] * LANES) if lanes > 1 else FLOAT(0.0)
                read, parts_of = (code.floats if lanes > 1 else code.scalar), width // lanes
                with runs(d_value, [zero] * (group * parts_of)) as (offset, size, place, totals):
                    with code.loop(0, size, 1, totals) as (index, found):
                        at = code.add(code.add(place, INT(start)), code.mul(index, INT(kv_heads * d_value)))
                        fetch(v, width, d_value, at, 1)
                        values = [read(v, dtype, code.add(at, INT(i * lanes))) for i in range(parts_of)]
                        for g in range(group):
                            where = code.add(weights[g], code.add(offset, index))
                            weight = like(code, zero, code.scalar(scratch, "float32", where))
                            for i, value in enumerate(values):
                                found[g * parts_of + i] = code.fma(weight, value, found[g * parts_of + i])
                    totals[:] = found
                for g in range(group):
                    target = code.add(code.mul(code.add(head, INT(g)), INT(d_value)), INT(start))
                    for i in range(parts_of):
                        value = code.fmul(totals[g * parts_of + i], like(code, zero, factors[g]))
                        code.put(value, y, dtype, code.add(target, INT(i * lanes)))

    return emit


@cache
def attention(
    heads: int, kv_heads: int, d_head: int, d_value: int, dtype: str, options: Options, paged: bool
) -> Callable[..., None]:
    """The kernel of `attend` as a function of its arguments, the number of items, and that of threads."""
    return callable_kernel(14, attend(heads, kv_heads, d_head, d_value, dtype, options, paged))


def pieces(width: int) -> list[tuple[int, int, int]]:
    """(start, width, lanes) of pieces of a value that fit into registers."""
    whole = width - width % LANES
    most = 4 * LANES
    vectors = [(start, min(most, whole - start), LANES) for start in range(0, whole, most)]
    return vectors + ([(whole, width - whole, 1)] if width > whole else [])
