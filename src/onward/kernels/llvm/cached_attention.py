"""Code of the kernel that attends to a contiguous or a paged cache. Only visible positions are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, NamedTuple

from llvmlite import ir

from onward.kernels.llvm.code import FLOAT, FLOATS, INT, LANES, Code
from onward.kernels.llvm.compiler import Emit, Values, arguments, callable_kernel
from onward.kernels.llvm.elementwise import exp, like, tanh
from onward.kernels.llvm.products import Row, tile
from onward.kernels.llvm.units import shuffle, sums, unit_for
from onward.kernels.llvm.writes import block_of
from onward.kernels.memory import Kernel

AttentionArguments = arguments(
    "AttentionArguments",
    *("y", "q", "k", "v", "tails", "k_scales", "v_scales", "tail_scales"),
    *("sinks", "slopes", "positions", "queries", "tokens"),
    *("slots", "row_slots", "scratch", "length", "table", "columns"),
)
AHEAD = 32  # keys and values are prefetched this many positions ahead
LINE = {"float32": 16, "bfloat16": 32, "int8": 64}  # elements in a cache line, by dtype
KEYS = 4  # number of keys, and maximum number of heads, whose scores are computed together
HEADS = 8  # maximum number of heads with the same keys that a thread computes together: their sums fit into registers
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)
LOWEST = ir.Constant(FLOATS, [float("-inf")] * LANES)


@dataclass(frozen=True)
class ScoreOptions:
    """The options of an attention kernel, which are constants in its code: the window in positions (0: all), whether a
    token sees its chunk of `window` positions instead of the last `window` positions, the scale of the scores, their
    softcap (None: no cap), and whether the heads have learned sink scores and ALiBi slopes."""

    window: int
    chunked: bool
    scale: float
    softcap: float | None
    sinks: bool
    slopes: bool


@dataclass(frozen=True)
class AttentionForm:
    """The constants for which an attention kernel is compiled: the numbers of heads and key/value heads, the sizes of
    their keys and values, the dtype of all tensors, the options, and whether the KV cache is paged. The last `d_tail`
    elements of each key are in a separate cache entry. The entries of a `quantized` cache are int8 codes with one scale
    per vector."""

    heads: int
    kv_heads: int
    d_head: int
    d_value: int
    dtype: str
    options: ScoreOptions
    paged: bool
    d_tail: int = 0
    quantized: bool = False

    @property
    def entry_dtype(self) -> str:
        """The dtype of the entries of the KV cache."""
        return "int8" if self.quantized else self.dtype

    @property
    def group(self) -> int:
        """The number of query heads that a thread computes together: the heads that share a key/value head, divided
        into equal groups of at most `HEADS` heads."""
        shared = self.heads // self.kv_heads
        return max(n for n in range(1, HEADS + 1) if shared % n == 0)

    @property
    def parts(self) -> list[range]:
        """The query heads of a group, numbered from 0, divided into ranges of up to `KEYS` heads, whose scores the code
        computes together."""
        return [range(g, min(g + KEYS, self.group)) for g in range(0, self.group, KEYS)]


def attend(form: AttentionForm) -> Emit:
    """Return the function that emits the code of the attention kernel with the arguments AttentionArguments. Threads
    divide the pairs of a group of heads and a token.

    q (B, T, H, E), k (B or blocks, S, K, E - R), tails (B or blocks, S, K, R), v (B or blocks, S, K, F), sinks (H,),
    positions (B, T), y (B, T, H, F); `queries` is B * T, `tokens` T, `slots` S, `columns` P. Rows of a contiguous cache
    are `row_slots` apart. Scales of k, v and tails are (B or blocks, S, K, 1). `scratch` has `length` floats for each
    thread and head of a group; `length` is at least the number of positions that a token sees. A token sees positions
    up to its own.
    """

    def emit(code: Code, given: Values, first: Any, end: Any) -> None:
        group = range(form.group)
        weights = [code.mul(code.add(code.mul(code.thread, INT(form.group)), INT(g)), given.length) for g in group]
        with code.loop(first, end) as (item, _):
            heads = HeadGroup(form, code, given, weights, item)
            peaks = heads.write_scores()
            factors = heads.write_weights(peaks)
            heads.write_sums(factors)

    return emit


class KeyPart(NamedTuple):
    """The part of the keys in one entry of the KV cache, at the address `entry`: `width` elements of each key, from
    element `start` on. `scales` is the address of their scales in a quantized cache."""

    entry: Any
    scales: Any
    start: int
    width: int


class SlotRun(NamedTuple):
    """A range of visible cache slots that are adjacent in memory, as LLVM values."""

    offset: Any  # offset of the run's first slot among the visible slots
    size: Any
    vector: Any  # index of the first slot's key, value or tail among these vectors


class HeadGroup:
    """The code of the attention kernel for one token and one group of query heads, which share a key/value head: they
    attend to the positions that the token sees.

    The scores of head g are in `scratch` from weights[g] on, and are later replaced by the unnormalized softmax
    weights.
    """

    def __init__(self, form: AttentionForm, code: Code, given: Values, weights: Sequence[Any], item: Any) -> None:
        self.form, self.code, self.given, self.weights = form, code, given, weights
        d_key = form.d_head - form.d_tail
        self.keys = [KeyPart(given.k, given.k_scales, 0, d_key)]
        if form.d_tail:
            self.keys.append(KeyPart(given.tails, given.tail_scales, d_key, form.d_tail))
        query, number = code.urem(item, given.queries), code.udiv(item, given.queries)
        self.kv_head = code.udiv(number, INT(form.heads // form.kv_heads // form.group))
        self.row, position = code.udiv(query, given.tokens), code.scalar(given.positions, "int64", query)
        self.count = code.add(position, INT(1))  # visible positions
        if form.options.chunked:
            self.count = code.add(code.urem(position, INT(form.options.window)), INT(1))
        elif form.options.window:
            self.count = code.least(self.count, INT(form.options.window))
        earliest = code.sub(code.add(position, INT(1)), self.count)
        self.begin, self.column = code.urem(earliest, given.slots), code.udiv(earliest, given.slots)
        self.until_end = code.least(self.count, code.sub(given.slots, self.begin))
        self.blocks_after = code.sub(code.udiv(position, given.slots), self.column)  # in a paged cache
        self.head = code.add(code.mul(query, INT(form.heads)), code.mul(number, INT(form.group)))

    @contextmanager
    def runs(self, carried: Sequence[Any]) -> Iterator[tuple[SlotRun, list[Any]]]:
        """Emit a loop over the ranges of visible cache slots that are adjacent in memory: one or two in a contiguous
        cache, one per block of a paged cache. The `with` body emits the code for one range. `carried` are the initial
        values of variables that the loop changes, as in `Code.loop`."""
        code, slots = self.code, self.given.slots
        with code.loop(0, code.add(self.blocks_after, INT(1)) if self.form.paged else 2, 1, carried) as (run, values):
            initial = code.icmp_signed("==", run, INT(0))
            offset = code.add(self.until_end, code.mul(code.sub(run, INT(1)), slots))
            offset = code.select(initial, INT(0), offset)
            size = code.select(initial, self.until_end, code.least(slots, code.sub(self.count, offset)))
            start = code.mul(self.row, self.given.row_slots)
            if self.form.paged:
                start = code.mul(block_of(code, self.given, self.row, code.add(self.column, run)), slots)
            slot = code.add(start, code.select(initial, self.begin, INT(0)))
            vector = code.add(code.mul(slot, INT(self.form.kv_heads)), self.kv_head)
            yield SlotRun(offset, size, vector), values

    def place(self, run: SlotRun, index: Any, width: int) -> Any:
        """Emit code for the index, in a cache entry, of the first number of this head's vector in slot number `index`
        of a run; vectors have `width` numbers."""
        code = self.code
        return code.mul(code.add(run.vector, code.mul(index, INT(self.form.kv_heads))), INT(width))

    def prefetch(self, matrix: Any, size: int, width: int, place: Any, count: int) -> None:
        """Emit prefetches of `size` numbers of each of `count` keys or values, AHEAD positions after the vector at
        index `place` of `matrix`. Vectors of this head are `kv_heads * width` numbers apart."""
        code, form = self.code, self.form
        for ahead in range(AHEAD, AHEAD + count):
            for start in range(0, size, LINE[form.entry_dtype]):
                index = code.add(place, INT(ahead * form.kv_heads * width + start))
                code.prefetch(code.at(matrix, form.entry_dtype, index))

    def write_scores(self) -> list[Any]:
        """Emit code that computes the attention scores of all heads of the group and all visible positions, and writes
        them to `scratch`; return, for each head, the greatest of its scores and its sink score."""
        code, form = self.code, self.form
        slopes = {(part, keys): self.slopes(part, keys) for part in form.parts for keys in (KEYS, 1)}
        with self.runs([LOWEST] * (2 * len(form.parts))) as (run, peaks):
            full_end = code.sub(run.size, code.urem(run.size, INT(KEYS)))
            for i, (start, stop, keys) in enumerate(((INT(0), full_end, KEYS), (full_end, run.size, 1))):
                with code.loop(start, stop, keys, peaks[i::2]) as (index, carried):
                    places = [self.place(run, index, key.width) for key in self.keys]
                    for key, place in zip(self.keys, places):
                        self.prefetch(key.entry, key.width, key.width, place, keys)
                    scales = self.key_scales(self.place(run, index, 1), keys)
                    for n, part in enumerate(form.parts):
                        number = code.add(run.offset, index)
                        products = self.products(part, keys, places, scales)
                        scores = self.write_scores_of(part, keys, products, number, slopes[part, keys])
                        more = code.fcmp_unordered(">", scores, carried[n])
                        carried[n] = code.select(more, scores, carried[n])
                peaks[i::2] = carried
        return self.with_sinks(self.greatest(peaks))

    def slopes(self, part: range, keys: int) -> Any:
        """Emit code for the slopes of the heads `part`, each repeated for `keys` keys, in a vector; None without a
        bias."""
        code, vector = self.code, ZEROS
        if not self.form.options.slopes:
            return None
        for i, g in enumerate(part):
            head = code.urem(code.add(self.head, INT(g)), INT(self.form.heads))
            slope = code.scalar(self.given.slopes, "float32", head)
            for lane in range(i * keys, (i + 1) * keys):
                vector = code.insert_element(vector, slope, ir.IntType(32)(lane))
        return vector

    def key_scales(self, vector: Any, keys: int) -> list[Any]:
        """Emit code for the scales of `keys` adjacent keys, starting with index `vector` among these vectors: for each
        part of the keys a vector that repeats its scales; empty if the cache is not quantized."""
        code, result = self.code, list[Any]()
        for key in self.keys if self.form.quantized else ():
            scales = ZEROS
            for i in range(keys):
                scale = code.scalar(key.scales, self.form.dtype, code.add(vector, INT(i * self.form.kv_heads)))
                scales = code.insert_element(scales, scale, ir.IntType(32)(i))
            result.append(shuffle(code, [lane % keys for lane in range(LANES)], scales))
        return result

    def products(self, part: range, keys: int, places: Sequence[Any], scales: Sequence[Any]) -> Any:
        """Emit code for the products of the queries of the heads `part` with `keys` adjacent keys, in one vector, head
        by head. `places` has, for each part of the keys, the index of the first key in its cache entry; `scales` comes
        from `key_scales`."""
        code, form, found = self.code, self.form, list[list[Any]]()
        for key, place in zip(self.keys, places):
            heads = [code.mul(code.add(self.head, INT(g)), INT(form.d_head)) for g in part]
            queries = [Row(self.given.q, form.dtype, code.add(head, INT(key.start))) for head in heads]
            starts = [code.add(place, INT(i * form.kv_heads * key.width)) for i in range(keys)]
            rows = [Row(key.entry, form.entry_dtype, start) for start in starts]
            found.append(tile(code, unit_for(form.dtype), queries, rows, INT(key.width)))
        if scales:
            return reduce(code.fadd, [code.fmul(sums(code, p), scale) for p, scale in zip(found, scales)])
        return sums(code, [reduce(code.fadd, vectors) for vectors in zip(*found)])

    def write_scores_of(self, part: range, keys: int, products: Any, index: Any, slopes: Any) -> Any:
        """Emit code that computes the scores of the heads `part` for `keys` adjacent keys from their `products`, and
        writes them to `scratch`. `index` is the number of the first key among the visible positions, and `slopes` comes
        from the method `slopes`. Return the scores in one vector, head by head."""
        code, form, given = self.code, self.form, self.given
        scores = code.fmul(products, like(code, products, form.options.scale))
        if form.options.softcap is not None:
            capped = tanh(code, code.fmul(scores, like(code, scores, 1 / form.options.softcap)))
            scores = code.fmul(capped, like(code, scores, form.options.softcap))
        if slopes is not None:
            first = code.repeat(code.sitofp(code.sub(code.add(index, INT(1)), self.count), FLOAT))
            distances = code.fadd(first, ir.Constant(FLOATS, [float(lane % keys) for lane in range(LANES)]))
            scores = code.fma(slopes, distances, scores)
        for i, g in enumerate(part):
            numbers = shuffle(code, range(i * keys, (i + 1) * keys), scores)
            code.put(numbers, given.scratch, "float32", code.add(self.weights[g], index))
        return scores

    def greatest(self, peaks: Sequence[Any]) -> list[Any]:
        """Emit code for the greatest score of each head. `peaks` are vectors of maxima, two for each range of heads: of
        the scores computed for KEYS keys together, and of the scores computed for single keys."""
        code, highest = self.code, [FLOAT(float("-inf"))] * self.form.group
        for n, part in enumerate(self.form.parts):
            for keys, peak in (KEYS, peaks[2 * n]), (1, peaks[2 * n + 1]):
                for i, g in enumerate(part):
                    for lane in range(i * keys, (i + 1) * keys):
                        score = code.extract_element(peak, ir.IntType(32)(lane))
                        highest[g] = code.select(code.fcmp_unordered(">", score, highest[g]), score, highest[g])
        return highest

    def sink(self, g: int) -> Any:
        """Emit code for the learned sink score of head g of the group."""
        head = self.code.urem(self.code.add(self.head, INT(g)), INT(self.form.heads))
        return self.code.scalar(self.given.sinks, self.form.dtype, head)

    def with_sinks(self, greatest: list[Any]) -> list[Any]:
        """Emit code for the maximum of each head's greatest score (`greatest`) and its learned sink score, if there are
        sinks."""
        code = self.code
        if not self.form.options.sinks:
            return greatest
        pairs = ((self.sink(g), number) for g, number in enumerate(greatest))
        return [code.select(code.fcmp_unordered(">", sink, number), sink, number) for sink, number in pairs]

    def write_weights(self, peaks: Sequence[Any]) -> list[Any]:
        """Emit code that replaces each score s in `scratch` by exp(s - peak), where peak is the greatest score of its
        head, from `peaks`; return the factor that normalizes the weights of each head."""
        code, factors = self.code, []
        vectors = code.sub(self.count, code.urem(self.count, INT(LANES)))
        for g, peak in enumerate(peaks):
            repeated = code.repeat(peak)
            with code.loop(0, vectors, LANES, [ZEROS]) as (index, totals):
                self.write_exp(g, index, repeated, totals, code.floats)
            with code.loop(vectors, self.count, 1, [code.sum(totals[0])]) as (index, totals):
                self.write_exp(g, index, peak, totals, code.scalar)
            total = totals[0]
            if self.form.options.sinks:
                total = code.fadd(total, exp(code, code.fsub(self.sink(g), peak)))
            factors.append(code.fdiv(FLOAT(1.0), total))
        return factors

    def write_exp(self, g: int, index: Any, peak: Any, totals: list[Any], read: Callable[..., Any]) -> None:
        """Emit code that replaces scores of head g in `scratch`, one or LANES of them from `index` on, by exp(score -
        peak), and adds the results to the sum totals[0]. `read` is the method of `Code` that reads the scores: a single
        number or a vector of LANES."""
        code, place = self.code, self.code.add(self.weights[g], index)
        value = exp(code, code.fsub(read(self.given.scratch, "float32", place), peak))
        code.put(value, self.given.scratch, "float32", place)
        totals[0] = code.fadd(totals[0], value)

    def write_sums(self, factors: Sequence[Any]) -> None:
        """Emit code that writes the result y: for each head, the sum of the values of the visible positions,
        weighted by the unnormalized softmax weights, times the head's factor."""
        for start, width, lanes in pieces(self.form.d_value):
            self.write_sums_of(start, width, lanes, factors)

    def write_sums_of(self, start: int, width: int, lanes: int, factors: Sequence[Any]) -> None:
        """Emit code that writes `width` numbers of the result y for each head, from number `start` of its vector on,
        `lanes` numbers at a time; `factors` normalize the softmax weights of each head."""
        code, form, given = self.code, self.form, self.given
        zero = ZEROS if lanes > 1 else FLOAT(0.0)
        read, count = (code.floats if lanes > 1 else code.scalar), width // lanes
        with self.runs([zero] * (form.group * count)) as (run, totals):
            with code.loop(0, run.size, 1, totals) as (index, carried):
                place = code.add(self.place(run, index, form.d_value), INT(start))
                self.prefetch(given.v, width, form.d_value, place, 1)
                values = [read(given.v, form.entry_dtype, code.add(place, INT(i * lanes))) for i in range(count)]
                scale = code.scalar(given.v_scales, form.dtype, self.place(run, index, 1)) if form.quantized else None
                for g in range(form.group):
                    weight = code.add(self.weights[g], code.add(run.offset, index))
                    weight = code.scalar(given.scratch, "float32", weight)
                    weight = like(code, zero, weight if scale is None else code.fmul(weight, scale))
                    for i, value in enumerate(values):
                        carried[g * count + i] = code.fma(weight, value, carried[g * count + i])
            totals[:] = carried
        for g in range(form.group):
            target = code.add(code.mul(code.add(self.head, INT(g)), INT(form.d_value)), INT(start))
            for i in range(count):
                value = code.fmul(totals[g * count + i], like(code, zero, factors[g]))
                code.put(value, given.y, form.dtype, code.add(target, INT(i * lanes)))


@cache
def attention(form: AttentionForm) -> Kernel:
    """Compile the attention kernel for these constants; return it as a function whose arguments are the fields of
    AttentionArguments."""
    return callable_kernel(AttentionArguments, attend(form))


def pieces(width: int) -> list[tuple[int, int, int]]:
    """Divide a value vector of `width` numbers into pieces (start, width, lanes) that fit into registers; a piece is
    read `lanes` numbers at a time."""
    full_end = width - width % LANES
    most = 4 * LANES
    vectors = [(start, min(most, full_end - start), LANES) for start in range(0, full_end, most)]
    return vectors + ([(full_end, width - full_end, 1)] if width > full_end else [])
