"""Attention of one new token per row over a contiguous cache, which reads the visible positions only.

Shapes: B rows, S slots, H heads, K key/value heads, G = H / K, E d_head, F width of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from onward.model.kernels.compiler import FLOAT, FLOATS, INT, LANES, Code, Emit
from onward.model.kernels.elementwise import exp, like, tanh


def write(width: int, dtype: str) -> Emit:
    """The kernel `(entry, vectors, positions, S)` that writes the vectors (B, width) of the tokens at `positions` (B,)
    to slots position % S of entries (B, S, width); an item is a row."""

    def emit(code: Code, arguments: Sequence[Any], first: Any, end: Any) -> None:
        entry, vectors, positions, slots = arguments
        with code.loop(first, end) as (row, _):
            slot = code.urem(code.scalar(positions, "int64", row), slots)
            target = code.mul(code.add(code.mul(row, slots), slot), INT(width))
            source = code.mul(row, INT(width))
            for begin, stop, count in (0, width - width % LANES, LANES), (width - width % LANES, width, 1):
                read = code.floats if count > 1 else code.scalar
                with code.loop(begin, stop, count) as (index, _):
                    code.put(read(vectors, dtype, code.add(source, index)), entry, dtype, code.add(target, index))

    return emit


@dataclass(frozen=True)
class Options:
    """Attention to the last `window` positions (0: all), a scale, a cap of the scores, and sinks or none."""

    window: int
    scale: float
    softcap: float | None
    sinks: bool


def attend(heads: int, kv_heads: int, d_head: int, d_value: int, dtype: str, options: Options) -> Emit:
    """The kernel `(y, q, k, v, sinks, positions, S, scratch)`; an item is a row and key/value head.

    q (B, H, E), k (B, S, K, E), v (B, S, K, F), sinks (H,), positions (B,), y (B, H, F); `scratch` has S floats for
    each of B and H. The row's token sees positions up to its own; position p is in slot p % S.
    """
    group = heads // kv_heads

    def emit(code: Code, arguments: Sequence[Any], first: Any, end: Any) -> None:
        y, q, k, v, sink_scores, positions, slots, scratch = arguments
        with code.loop(first, end) as (item, _):
            row, kv_head = code.udiv(item, INT(kv_heads)), code.urem(item, INT(kv_heads))
            position = code.scalar(positions, "int64", row)
            count = code.add(position, INT(1))
            if options.window:
                count = code.select(code.icmp_signed(">", count, INT(options.window)), INT(options.window), count)
            begin = code.sub(code.add(position, INT(1)), count)
            head = code.add(code.mul(row, INT(heads)), code.mul(kv_head, INT(group)))
            queries = [code.mul(code.add(head, INT(g)), INT(d_head)) for g in range(group)]
            weights = [code.mul(code.add(head, INT(g)), slots) for g in range(group)]

            def place(index: Any, width: int) -> Any:
                slot = code.urem(code.add(begin, index), slots)
                slot = code.add(code.mul(row, slots), slot)
                return code.mul(code.add(code.mul(slot, INT(kv_heads)), kv_head), INT(width))

            whole = d_head - d_head % LANES
            places, rest_places = range(0, whole, LANES), range(whole, d_head)
            query = [[code.floats(q, dtype, code.add(start, INT(e))) for e in places] for start in queries]
            tail = [[code.scalar(q, dtype, code.add(start, INT(e))) for e in rest_places] for start in queries]
            least = [FLOAT(float("-inf"))] * group
            with code.loop(0, count, 1, least) as (index, greatest):
                at = place(index, d_head)
                keys = [code.floats(k, dtype, code.add(at, INT(e))) for e in places]
                rest = [code.scalar(k, dtype, code.add(at, INT(e))) for e in rest_places]
                for g in range(group):
                    total = FLOAT(0.0)
                    if keys:
                        lanes = code.fmul(query[g][0], keys[0])
                        for a, b in zip(query[g][1:], keys[1:]):
                            lanes = code.fma(a, b, lanes)
                        total = code.sum(lanes)
                    for a, b in zip(tail[g], rest):
                        total = code.fma(a, b, total)
                    total = code.fmul(total, FLOAT(options.scale))
                    if options.softcap is not None:
                        total = code.fmul(
                            FLOAT(options.softcap), tanh(code, code.fmul(total, FLOAT(1 / options.softcap)))
                        )
                    code.put(total, scratch, "float32", code.add(weights[g], index))
                    more = code.fcmp_unordered(">", total, greatest[g])  # NaN spreads
                    greatest[g] = code.select(more, total, greatest[g])
            if options.sinks:
                for g in range(group):
                    sink = code.scalar(sink_scores, dtype, code.urem(code.add(head, INT(g)), INT(heads)))
                    greatest[g] = code.select(code.fcmp_unordered(">", sink, greatest[g]), sink, greatest[g])
            factors = []
            vectors = code.sub(count, code.urem(count, INT(LANES)))
            for g in range(group):
                zero, peak = ir.Constant(FLOATS, [0.0] * LANES), code.repeat(greatest[g])
                with code.loop(0, vectors, LANES, [zero]) as (index, sums):
                    where = code.add(weights[g], index)
                    value = exp(code, code.fsub(code.floats(scratch, "float32", where), peak))
                    code.put(value, scratch, "float32", where)
                    sums[0] = code.fadd(sums[0], value)
                with code.loop(vectors, count, 1, [code.sum(sums[0])]) as (index, sums):
                    where = code.add(weights[g], index)
                    value = exp(code, code.fsub(code.scalar(scratch, "float32", where), greatest[g]))
                    code.put(value, scratch, "float32", where)
                    sums[0] = code.fadd(sums[0], value)
                total = sums[0]
                if options.sinks:
                    sink = code.scalar(sink_scores, dtype, code.urem(code.add(head, INT(g)), INT(heads)))
                    total = code.fadd(total, exp(code, code.fsub(sink, greatest[g])))
                factors.append(code.fdiv(FLOAT(1.0), total))
            for start, width, lanes in pieces(d_value):
                zero = ir.Constant(FLOATS, [0.0] * LANES) if lanes > 1 else FLOAT(0.0)
                read, parts = (code.floats if lanes > 1 else code.scalar), width // lanes
                with code.loop(0, count, 1, [zero] * (group * parts)) as (index, sums):
                    at = code.add(place(index, d_value), INT(start))
                    values = [read(v, dtype, code.add(at, INT(i * lanes))) for i in range(parts)]
                    for g in range(group):
                        weight = like(code, zero, code.scalar(scratch, "float32", code.add(weights[g], index)))
                        for i, value in enumerate(values):
                            sums[g * parts + i] = code.fma(weight, value, sums[g * parts + i])
                for g in range(group):
                    target = code.add(code.mul(code.add(head, INT(g)), INT(d_value)), INT(start))
                    for i in range(parts):
                        value = code.fmul(sums[g * parts + i], like(code, zero, factors[g]))
                        code.put(value, y, dtype, code.add(target, INT(i * lanes)))

    return emit


def pieces(width: int) -> list[tuple[int, int, int]]:
    """(start, width, lanes) of pieces of a value that fit into registers."""
    whole = width - width % LANES
    most = 4 * LANES
    vectors = [(start, min(most, whole - start), LANES) for start in range(0, whole, most)]
    return vectors + ([(whole, width - whole, 1)] if width > whole else [])
