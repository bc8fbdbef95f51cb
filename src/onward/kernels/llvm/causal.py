"""Code of causal self-attention over windows, and of its gradients, for training.

The kernels compute in fp32, in blocks of LANES queries. Scores and weights are stored as one vector of LANES queries
for each key, so that a softmax needs no sum within a vector. Keys that come after all queries of a block are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from onward.kernels.llvm.code import FLOATS, INT, LANES, Code, number
from onward.kernels.llvm.compiler import Values, arguments, callable_kernel
from onward.kernels.llvm.draws import LOWEST
from onward.kernels.llvm.elementwise import exp
from onward.kernels.llvm.units import ZERO, shuffle
from onward.kernels.memory import Kernel

INPUTS = "q", "k", "v", "q_stride", "k_stride", "v_stride", "tokens", "scratch"
CausalArguments = arguments("CausalArguments", "out", "statistics", *INPUTS)
CausalGradientArguments = arguments("CausalGradientArguments", "of_q", "of_k", "of_v", "outer", "statistics", *INPUTS)
MASKS = [
    ir.Constant(ir.VectorType(ir.IntType(1), LANES), [lane >= key for lane in range(LANES)]) for key in range(LANES)
]
ALL = ir.Constant(MASKS[0].type, [True] * LANES)
NOTHING = ir.Constant(FLOATS, [LOWEST] * LANES)


@dataclass(frozen=True)
class Causal:
    """The constants for which a kernel of causal attention is compiled: the numbers of heads and key/value heads, of
    `width` numbers each (a multiple of LANES), their dtype, and the scale of the scores."""

    heads: int
    kv_heads: int
    width: int
    dtype: str
    scale: float

    def scratch(self, tokens: int) -> int:
        """Return how many fp32 numbers of scratch memory a thread needs for windows of `tokens` tokens."""
        return tokens * (4 * self.width + 2 * LANES) + 4 * LANES * self.width


class Work:
    """The emitter of the steps of both causal attention kernels, forward and gradient, for one window of tokens and one
    key/value head. Its tensors are parts of the thread's scratch memory, given by their indices: keys, values, and the
    gradients of both (T, width); weights and their gradients (T, LANES); one block of queries and of the output's
    gradients, each as (LANES, width) and transposed."""

    def __init__(self, code: Code, shape: Causal, given: Values, item: Any) -> None:
        self.code, self.shape, self.given = code, shape, given
        self.window, self.kv_head = code.udiv(item, INT(shape.kv_heads)), code.urem(item, INT(shape.kv_heads))
        base = code.mul(code.thread, self.sized(4 * shape.width + 2 * LANES, 4 * LANES * shape.width))
        self.memory = code.add(given.scratch, code.mul(base, INT(4)))
        of_token = [shape.width] * 4 + [LANES] * 2
        starts = [self.sized(sum(of_token[:i])) for i in range(len(of_token) + 1)]
        self.keys, self.values, self.of_keys, self.of_values, self.weights, self.of_weights, rest = starts
        block = LANES * shape.width
        self.queries, self.outers, self.queries_t, self.outers_t = (code.add(rest, INT(i * block)) for i in range(4))

    def sized(self, per_token: int, more: int = 0) -> Any:
        """Emit code that computes tokens * per_token + more, the number of elements of a scratch tensor; return the
        LLVM value."""
        return self.code.add(self.code.mul(self.given.tokens, INT(per_token)), INT(more))

    def place(self, start: Any, index: Any, stride: int = 1) -> Any:
        """Emit code for the index start + index * stride."""
        return self.code.add(start, self.code.mul(number(index), INT(stride)))

    def read(self, place: Any) -> Any:
        return self.code.floats(self.memory, "float32", place)

    def write(self, value: Any, place: Any) -> None:
        self.code.put(value, self.memory, "float32", place)

    def token(self, index: Any, stride: Any, head: Any) -> Any:
        """Emit code for the index of the first number of head `head` of token `index` of the window, in a tensor whose
        tokens are `stride` numbers apart."""
        row = self.code.add(self.code.mul(self.window, self.given.tokens), index)
        return self.code.add(self.code.mul(row, stride), self.code.mul(head, INT(self.shape.width)))

    def convert(self, source: Any, stride: Any, target: Any) -> None:
        """Emit code that copies the vectors of this key/value head of all tokens from the tensor `source`, whose tokens
        are `stride` numbers apart, to the scratch tensor `target`, in fp32."""
        code, width = self.code, self.shape.width
        with code.loop(0, self.given.tokens) as (token, _):
            start, to = self.token(token, stride, self.kv_head), self.place(target, token, width)
            for part in range(0, width, LANES):
                value = code.floats(source, self.shape.dtype, code.add(start, INT(part)))
                self.write(value, code.add(to, INT(part)))

    @contextmanager
    def blocks_of_queries(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Emit loops over the query heads that share the key/value head and over blocks of LANES queries. The `with`
        body, which emits the code for one block, gets (block number, head, first query, end of the visible keys); the
        block's scores are in the scratch tensor `weights`."""
        code, given, group = self.code, self.given, self.shape.heads // self.shape.kv_heads
        with code.loop(0, group) as (member, _), code.loop(0, code.udiv(given.tokens, INT(LANES))) as (block, _):
            head = code.add(code.mul(self.kv_head, INT(group)), member)
            first, end = code.mul(block, INT(LANES)), code.mul(code.add(block, INT(1)), INT(LANES))
            self.block(given.q, given.q_stride, head, first, self.queries, self.queries_t, self.shape.scale)
            self.products(block, self.queries_t, self.keys, self.weights, LOWEST)
            yield block, head, first, end

    def block(self, source: Any, stride: Any, head: Any, first: Any, plain: Any, transposed: Any, scale: float) -> None:
        """Emit code that copies vectors of `head` of the LANES tokens from `first` on, times `scale`, from `source`
        (tokens `stride` numbers apart) to the scratch tensors `plain` (LANES, width) and `transposed` (width,
        LANES)."""
        code, width = self.code, self.shape.width
        with code.loop(0, width, LANES) as (part, _):
            rows = []
            for row in range(LANES):
                start = code.add(self.token(code.add(first, INT(row)), stride, head), part)
                rows.append(
                    code.fmul(code.floats(source, self.shape.dtype, start), ir.Constant(FLOATS, [scale] * LANES))
                )
                self.write(rows[-1], self.place(code.add(plain, part), row, width))
            for column, values in enumerate(transpose(code, rows)):
                self.write(values, self.place(self.place(transposed, part, LANES), column, LANES))

    def tile(
        self, a: Any, a_strides: tuple[int, int], b: Any, b_stride: int, count: Any, sums: Sequence[Any] | None = None
    ) -> list[Any]:
        """Emit the product of a matrix `a` of LANES rows and a matrix `b` of LANES columns in scratch memory, with
        `count` columns of `a` and rows of `b`, and return its LANES rows as vectors, added to the vectors `sums`, if
        given. `a` and `b` are the indices of their first numbers, `a_strides` the row and column strides of `a`,
        `b_stride` the row stride of `b`."""
        code, (row_stride, stride) = self.code, a_strides
        with code.loop(0, count, 1, sums or [ZERO] * LANES) as (index, totals):
            vector, start = self.read(self.place(b, index, b_stride)), self.place(a, index, stride)
            for row in range(LANES):
                factor = code.scalar(self.memory, "float32", code.add(start, INT(row * row_stride)))
                totals[row] = code.fma(code.repeat(factor), vector, totals[row])
        return totals

    def products(self, block: Any, transposed: Any, operand: Any, target: Any, masked: float | None) -> None:
        """Emit code that multiplies the keys or values (`operand`) of blocks 0 to `block` with a transposed block of
        queries or output gradients, and writes the products to the scratch tensor `target` (T, LANES). `masked`
        replaces the products of keys that come after the query (None: keep the products)."""
        code, width = self.code, self.shape.width
        with code.loop(0, code.add(block, INT(1))) as (keys, _):
            rows = self.tile(self.place(operand, keys, LANES * width), (width, 1), transposed, LANES, width)
            earlier = code.icmp_signed("<", keys, block)
            for row, value in enumerate(rows):
                if masked is not None:
                    value = code.select(
                        code.select(earlier, ALL, MASKS[row]), value, ir.Constant(FLOATS, [masked] * LANES)
                    )
                self.write(value, self.place(self.place(target, keys, LANES * LANES), row, LANES))

    def powers(self, end: Any, top: Any, factor: Any | None = None) -> Any:
        """Emit code that replaces the first `end` scores of each query of the block by e ** (score - top), times
        `factor` if given; return the sum for each query, as a vector. `top` has each query's greatest score."""
        code = self.code
        with code.loop(0, end, 1, [ZERO]) as (key, sums):
            place = self.place(self.weights, key, LANES)
            score = self.read(place)
            seen = code.fcmp_unordered("!=", score, NOTHING)  # NaN stays NaN
            power = code.select(seen, exp(code, code.fsub(score, top)), ZERO)
            power = power if factor is None else code.fmul(power, factor)
            self.write(power, place)
            sums[0] = code.fadd(sums[0], power)
        return sums[0]

    def through_softmax(self, end: Any) -> None:
        """Emit the backward pass of the softmax: code that replaces the gradients of the first `end` attention weights
        of each query by the gradients of the scores."""
        code, both = self.code, (self.weights, self.of_weights)
        with code.loop(0, end, 1, [ZERO]) as (key, means):
            weight, of_weight = (self.read(self.place(start, key, LANES)) for start in both)
            means[0] = code.fma(weight, of_weight, means[0])
        with code.loop(0, end) as (key, _):
            weight, of_weight = (self.read(self.place(start, key, LANES)) for start in both)
            value = code.fmul(weight, code.fsub(of_weight, means[0]))
            self.write(value, self.place(self.of_weights, key, LANES))

    def statistics(self, head: Any, first: Any) -> tuple[Any, Any]:
        """Emit code for two indices into the tensor of softmax statistics, for head `head` and the queries from `first`
        on: the index of the greatest scores, and the index of the inverse denominators."""
        code, given = self.code, self.given
        row = code.add(code.mul(self.window, INT(self.shape.heads)), head)
        start = code.add(code.mul(code.mul(row, given.tokens), INT(2)), first)
        return start, code.add(start, given.tokens)

    def sums_of(self, weights: Any, operand: Any, end: Any, target: Any, head: Any, first: Any, factor: Any) -> None:
        """Emit code that writes to `target` (B, T, H, width), for head `head` and the queries from `first` on, the sums
        of the first `end` keys or values (`operand`) weighted by `weights`, times each query's number in the vector
        `factor`."""
        code, width, dtype = self.code, self.shape.width, self.shape.dtype
        stride = INT(self.shape.heads * width)
        with code.loop(0, width, LANES) as (part, _):
            rows = self.tile(weights, (1, LANES), code.add(operand, part), width, end)
            for row, value in enumerate(rows):
                place = code.add(self.token(code.add(first, INT(row)), stride, head), part)
                code.put(code.fmul(value, shuffle(code, [row] * LANES, factor)), target, dtype, place)

    def accumulate(self, block: Any, weights: Any, operand: Any, target: Any) -> None:
        """Emit code that adds to `target` (T, width), gradients of keys or values, the product of the transposed
        `weights` of block number `block` of queries with `operand` (LANES, width)."""
        code, width = self.code, self.shape.width
        with code.loop(0, code.add(block, INT(1))) as (keys, _), code.loop(0, width, LANES) as (part, _):
            start = code.add(self.place(target, keys, LANES * width), part)
            places = [code.add(start, INT(row * width)) for row in range(LANES)]
            sums, a = [self.read(place) for place in places], self.place(weights, keys, LANES * LANES)
            for place, value in zip(places, self.tile(a, (LANES, 1), code.add(operand, part), width, LANES, sums)):
                self.write(value, place)


@cache
def causal(shape: Causal) -> Kernel:
    """Compile the kernel of causal self-attention, whose arguments are the fields of CausalArguments; an item is a
    window and a key/value head.

    Tokens of q, k and v are `q_stride`, ... numbers apart, their heads contiguous. `out` (B, T, H, width) is
    contiguous, `statistics` (B, H, 2, T) in fp32 are the greatest score of each query and the inverse of the softmax's
    denominator. T is a multiple of LANES.
    """

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (item, _):
            work = Work(code, shape, given, item)
            work.convert(given.k, given.k_stride, work.keys)
            work.convert(given.v, given.v_stride, work.values)
            with work.blocks_of_queries() as (_, head, start, limit):
                with code.loop(0, limit, 1, [NOTHING]) as (key, tops):
                    score = work.read(work.place(work.weights, key, LANES))
                    tops[0] = code.select(code.fcmp_ordered(">", score, tops[0]), score, tops[0])
                factor = code.fdiv(ir.Constant(FLOATS, [1.0] * LANES), work.powers(limit, tops[0]))
                for value, place in zip((tops[0], factor), work.statistics(head, start)):
                    code.put(value, given.statistics, "float32", place)
                work.sums_of(work.weights, work.values, limit, given.out, head, start, factor)

    return callable_kernel(CausalArguments, emit)


@cache
def causal_gradient(shape: Causal) -> Kernel:
    """Compile the kernel for the gradients of `causal` with the fields of CausalGradientArguments; an item is a window
    and a key/value head.

    `of_q`, `of_k` and `of_v` are the gradients, and `outer` (B, T, H, width) is the gradient of the output; all are
    contiguous.
    """

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        with code.loop(first, end) as (item, _):
            work = Work(code, shape, given, item)
            work.convert(given.k, given.k_stride, work.keys)
            work.convert(given.v, given.v_stride, work.values)
            with code.loop(0, work.sized(2 * shape.width), LANES) as (index, _):
                work.write(ZERO, code.add(work.of_keys, index))
            with work.blocks_of_queries() as (block, head, start, limit):
                work.block(given.outer, INT(shape.heads * shape.width), head, start, work.outers, work.outers_t, 1.0)
                work.products(block, work.outers_t, work.values, work.of_weights, None)
                top, factor = (code.floats(given.statistics, "float32", p) for p in work.statistics(head, start))
                work.powers(limit, top, factor)
                work.through_softmax(limit)
                scale = ir.Constant(FLOATS, [shape.scale] * LANES)
                work.sums_of(work.of_weights, work.keys, limit, given.of_q, head, start, scale)
                work.accumulate(block, work.weights, work.outers, work.of_values)
                work.accumulate(block, work.of_weights, work.queries, work.of_keys)
            stride = INT(shape.kv_heads * shape.width)
            for source, target in (work.of_keys, given.of_k), (work.of_values, given.of_v):
                with code.loop(0, given.tokens) as (token, _), code.loop(0, shape.width, LANES) as (part, _):
                    value = work.read(code.add(work.place(source, token, shape.width), part))
                    code.put(value, target, shape.dtype, code.add(work.token(token, stride, work.kv_head), part))

    return callable_kernel(CausalGradientArguments, emit)


def transpose(code: Code, rows: Sequence[Any]) -> list[Any]:
    """Emit the transpose of a LANES by LANES matrix, given as its `rows`, LANES vectors; return the columns as
    vectors."""
    rows, step = list(rows), LANES // 2
    while step:
        low = [lane if not lane & step else lane - step + LANES for lane in range(LANES)]
        high = [lane + step if not lane & step else lane + LANES for lane in range(LANES)]
        for row in range(LANES):
            if not row & step:
                a, b = rows[row], rows[row + step]
                rows[row], rows[row + step] = shuffle(code, low, a, b), shuffle(code, high, a, b)
        step //= 2
    return rows
