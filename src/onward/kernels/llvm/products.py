"""Code of products with a weight, y = x Wᵀ + bias: limited by memory for few rows of x, by arithmetic for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from onward.kernels.llvm import int4, matrix_products
from onward.kernels.llvm.code import FLOATS, INT, LANES, Code
from onward.kernels.llvm.compiler import Emit, Values, arguments, callable_kernel
from onward.kernels.llvm.matrix import has_matrix_unit
from onward.kernels.llvm.units import ZERO, Unit, shuffle, sums, unit_for
from onward.kernels.memory import Kernel

TILE = 4  # rows of x, and of the weight, in one pass over the inputs: their sums fit into the registers
PREFETCHED = 48  # minimum number of rows of x for which prefetching the weight costs more time than it saves
# minimum number of rows of x for which tiles of TILE rows are faster
FEW = {"float32": 2, "bfloat16": TILE, "int8": TILE, "int4": 2 * TILE + 1}
# bytes of a tile of x and of the rows of the weight that are multiplied with it in turn, to fit in the L1 cache
GROUP = 40_000
SIZES = {"float32": 4, "bfloat16": 2}  # bytes of a number
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
LINE = 64  # bytes of a cache line
BLOCK = 1 << 18  # elements of x that stay in a core's cache while it reads the weight
ProductArguments = arguments("ProductArguments", "x", "weight", "scales", "bias", "y", "rows", "outputs", "inputs")


@dataclass(frozen=True)
class Row:
    """A row of a matrix, as LLVM values: the address and dtype of the matrix, and the index of the row's first number.
    The numbers of a row are contiguous."""

    address: Any
    dtype: str
    first: Any

    def read(self, code: Code, unit: Unit, index: Any, left: Any) -> Any:
        """Emit code for the vector of `unit` that begins at number `index` of the row; see `Unit.read` for `left`."""
        return unit.read(code, self.address, self.dtype, code.add(self.first, index), left)


@dataclass(frozen=True)
class PackedRow(Row):
    """A row of an int8 or int4 weight. While it is read, it is unpacked to the dtype of the arithmetic and written to
    the row `unpacked`, which is padded to full vectors."""

    scales: Any
    unpacked: Row

    def read(self, code: Code, unit: Unit, index: Any, left: Any) -> Any:
        place = code.add(self.first, index)
        if self.dtype == "int4":
            vector = int4.unpack(code, unit, self.address, self.scales, place)
        else:
            vector = unit.read(code, self.address, self.dtype, place, left)
        target = code.at(self.unpacked.address, unit.dtype, code.add(self.unpacked.first, index))
        code.store(vector, code.bitcast(target, vector.type.as_pointer()), align=1)
        return vector


class Ahead(NamedTuple):
    """The part of a weight, in its stored format, that is prefetched: its address, and the bytes to prefetch for each
    input of a tile."""

    address: Any
    size: int


@dataclass(frozen=True)
class Product:
    """The code of a kernel that multiplies x with a weight in `weight_format` (float32, bfloat16, int8 or int4); x,
    bias and result y are in `dtype`."""

    weight_format: str
    dtype: str
    biased: bool
    unit: Unit
    has_matrix_unit: bool = False

    def emit(self, code: Code, given: Values, first: Any, end: Any) -> None:
        """Emit code that multiplies all rows of x with the rows `first` to `end` - 1 of the weight; `given` are the
        kernel's arguments."""
        if self.has_matrix_unit:
            with code.if_else(matrix_products.is_tiled(code, given)) as (tiled, other):
                with tiled:
                    matrix_products.FORMATS[self.weight_format](code, given, self.finished).emit(first, end)
                with other:
                    self.vector_rows(code, given, first, end)
        else:
            self.vector_rows(code, given, first, end)

    def vector_rows(self, code: Code, given: Values, first: Any, end: Any) -> None:
        """Emit the code of `emit` with the vector instructions of a CPU."""
        with code.if_else(code.icmp_signed("<", given.rows, INT(FEW[self.weight_format]))) as (few, many):
            with few:
                if self.weight_format == "float32":
                    self.many_rows(code, given, first, end, True, 1)
                else:
                    self.few_rows(code, given, first, end)
            with many:
                if self.unpacked:
                    self.many_rows(code, given, first, end, True)
                else:
                    with code.if_else(code.icmp_signed("<", given.rows, INT(PREFETCHED))) as (fetching, other):
                        for part, prefetches in (fetching, True), (other, False):
                            with part:
                                self.many_rows(code, given, first, end, prefetches)

    @property
    def unpacked(self) -> bool:
        """Whether tiles of the weight are unpacked to the dtype of the arithmetic before they are multiplied."""
        return self.weight_format in ("int8", "int4")

    def x_index(self, code: Code, given: Values, row: Any) -> Any:
        """Emit code for the index of the first number of a row of x."""
        return code.mul(row, given.inputs)

    def y_index(self, code: Code, given: Values, row: Any) -> Any:
        """Emit code for the index of the first number of a row of y."""
        return code.mul(row, given.outputs)

    def few_rows(self, code: Code, given: Values, first: Any, end: Any) -> None:
        """Emit code that multiplies all rows of x with the rows `first` to `end` - 1 of the weight, one row of the
        weight after the other, for few rows of x; `given` are the kernel's arguments."""
        x, dtype, unit, rows, inputs = given.x, self.dtype, self.unit, given.rows, given.inputs
        if self.weight_format == "int4":
            unit = int4.unit_of(unit)
            prepared = int4.prepare(code, unit, x, dtype, rows, inputs)
            with code.loop(first, end) as (output, _):
                for begin, stop, size in parts(code, INT(0), rows):
                    with code.loop(begin, stop, size) as (row, _):
                        these = [code.add(row, INT(i)) for i in range(size)]
                        partials = int4.dot(code, unit, prepared, these, given.weight, given.scales, output, inputs)
                        self.store(code, given, partials, these, output, 1)
            return
        if self.weight_format == "int8" and dtype == "bfloat16":  # converting to fp32 takes fewer instructions
            x, dtype, unit = widened(code, x, dtype, code.mul(rows, inputs)), "float32", Unit()
        with code.loop(first, end) as (output, _), code.loop(0, rows) as (row, _):
            of_x = Row(x, dtype, self.x_index(code, given, row))
            of_weight = Row(given.weight, self.weight_format, code.mul(output, inputs))
            chains = 4 if self.weight_format == "int8" else 1
            partials = tile(code, unit, [of_x], [of_weight], inputs, chains=chains)
            self.store(code, given, partials, [row], output, 1)

    def many_rows(self, code: Code, given: Values, first: Any, end: Any, prefetches: bool, size: int = TILE) -> None:
        """Emit code for the products of `few_rows` in tiles: the rows of x are divided into blocks, and each block is
        multiplied with all rows of the weight, one group of rows at a time, which stays in the L1 cache. `prefetches`:
        whether the next group is prefetched at the same time; `size`: the number of rows of x in a tile."""
        rows, inputs = given.rows, given.inputs
        block = code.mul(code.add(code.udiv(INT(BLOCK // TILE), inputs), INT(1)), INT(TILE))
        tiles = code.udiv(INT(GROUP // (TILE * SIZES[self.unit.dtype])), inputs)  # including the tile of x
        group, unpacked = code.mul(greatest(code, code.sub(tiles, INT(1)), INT(1)), INT(TILE)), []
        if self.unpacked:
            group = INT(TILE)
            vectors = code.udiv(code.add(inputs, INT(self.unit.step - 1)), INT(self.unit.step))
            memory = code.ptrtoint(code.alloca(self.unit.vector, size=code.mul(vectors, group)), INT)
            stride = code.mul(vectors, INT(self.unit.step))
            unpacked = [Row(memory, self.unit.dtype, code.mul(stride, INT(i))) for i in range(TILE)]
        with code.loop(0, rows, block) as (begin, _), code.loop(first, end, group) as (start, _):
            stop, to = code.least(code.add(begin, block), rows), code.least(code.add(start, group), end)
            self.tiles(code, given, (begin, stop), (start, to), group if prefetches else None, unpacked, size)

    def tiles(
        self,
        code: Code,
        given: Values,
        rows: tuple[Any, Any],
        outputs: tuple[Any, Any],
        ahead: Any,
        unpacked: Sequence[Row],
        size: int,
    ) -> None:
        """Emit code that multiplies the rows of x in the range `rows` (begin, end) with the rows of the weight in the
        range `outputs` (begin, end), tile by tile. While a tile is multiplied, the code prefetches the tile `ahead`
        outputs later (None: no prefetch). The first tile of rows unpacks an int8 or int4 weight to the rows `unpacked`,
        which the other tiles read, so that conversions and products overlap."""
        inputs, (first_row, stop) = given.inputs, rows
        with code.loop(first_row, stop, size) as (start, _):
            # the last tile repeats the last row, which is faster than tiles of fewer rows, and less code
            numbers = [code.least(code.add(start, INT(i)), code.sub(stop, INT(1))) for i in range(size)]
            x = [Row(given.x, self.dtype, self.x_index(code, given, row)) for row in numbers]
            for begin, end, width in parts(code, *outputs):
                with code.loop(begin, end, width) as (output, _):
                    starts = [code.mul(code.add(output, INT(i)), inputs) for i in range(width)]
                    stored = [Row(given.weight, self.weight_format, index) for index in starts]
                    later = None
                    if ahead is not None and width == TILE:
                        bits = BITS[self.weight_format]
                        place = code.mul(code.mul(code.add(output, ahead), inputs), INT(bits))
                        later = Ahead(code.add(given.weight, code.lshr(place, INT(3))), TILE * bits // 8)
                    multiply = partial(self.multiply, code, given, x, numbers, output)
                    if not unpacked:
                        multiply(stored, later)
                        continue
                    offset = code.mul(code.sub(output, outputs[0]), unpacked[1].first)
                    kept = [replace(row, first=code.add(row.first, offset)) for row in unpacked[:width]]
                    packed = [
                        PackedRow(row.address, row.dtype, row.first, given.scales, to) for row, to in zip(stored, kept)
                    ]
                    with code.if_else(code.icmp_signed("==", start, first_row)) as (new, known):
                        with new:
                            multiply(packed, later)
                        with known:
                            multiply(kept, None)

    def multiply(
        self,
        code: Code,
        given: Values,
        x: Sequence[Row],
        rows: Sequence[Any],
        output: Any,
        weight: Sequence[Row],
        ahead: Ahead | None,
    ) -> None:
        """Emit code that writes a tile of y: its rows `rows` are computed from the rows `x` of x, and its columns, from
        column `output` on, from the rows `weight`."""
        partials = tile(code, self.unit, x, weight, given.inputs, ahead)
        self.store(code, given, partials, rows, output, len(weight))

    def store(
        self, code: Code, given: Values, vectors: Sequence[Any], rows: Sequence[Any], output: Any, outputs: int
    ) -> None:
        """Emit code that writes a tile of y, the rows `rows` and `outputs` columns from `output` on, given a vector of
        partial sums for each number of the tile, row by row."""
        totals = self.finished(code, given, sums(code, vectors), output, outputs)
        for i, row in enumerate(rows):
            numbers = shuffle(code, [i * outputs + j for j in range(outputs)], totals)
            code.put(numbers, given.y, self.dtype, code.add(self.y_index(code, given, row), output))

    def finished(self, code: Code, given: Values, totals: Any, output: Any, outputs: int) -> Any:
        """Emit code that multiplies sums of products by the scales of an int8 weight and adds the bias, if any;
        `totals` has `outputs` columns of y from column `output` on, row by row."""
        if self.weight_format == "int8":
            totals = code.fmul(totals, repeated(code, given.scales, "float32", output, outputs))
        if self.biased:
            totals = code.fadd(totals, repeated(code, given.bias, self.dtype, output, outputs))
        return totals


def tile(
    code: Code,
    unit: Unit,
    x: Sequence[Row],
    weight: Sequence[Row],
    inputs: Any,
    ahead: Ahead | None = None,
    chains: int = 1,
) -> list[Any]:
    """Emit code that multiplies rows of x with rows of the weight, each of `inputs` numbers; return the vectors of
    partial sums.

    `ahead`: the part of the weight to prefetch at the same time; every pass over the same rows of the weight prefetches
    the same part again, since asking whether it was prefetched would cost more. An addition waits for the previous
    addition to the same sum; if a tile has few sums, each is therefore divided into `chains` sums.
    """
    count = len(x) * len(weight)
    wide, full_end = (code.sub(inputs, code.urem(inputs, INT(n))) for n in (unit.step * chains, unit.step))

    def add(index: Any, totals: list[Any], left: Any) -> None:
        vectors = [row.read(code, unit, index, left) for row in weight]
        for i, row in enumerate(x):
            numbers = row.read(code, unit, index, left)
            for j, vector in enumerate(vectors):
                totals[i * len(weight) + j] = unit.add(code, vector, numbers, totals[i * len(weight) + j])

    with code.loop(0, wide, unit.step * chains, [ZERO] * (count * chains)) as (index, totals):
        if ahead is not None:
            start = code.mul(index, INT(ahead.size))
            for line in range(0, unit.step * ahead.size, LINE):
                code.prefetch(code.at(ahead.address, "int8", code.add(start, INT(line))))
        for i in range(chains):
            part = totals[i * count : (i + 1) * count]
            add(code.add(index, INT(i * unit.step)), part, None)
            totals[i * count : (i + 1) * count] = part
    while len(totals) > count:
        half = len(totals) // 2
        totals = [code.fadd(a, b) for a, b in zip(totals[:half], totals[half:])]
    if chains > 1:
        with code.loop(wide, full_end, unit.step, totals) as (index, totals):
            add(index, totals, None)
    with code.loop(full_end, inputs, unit.step, totals) as (index, totals):
        add(index, totals, code.sub(inputs, index))
    return totals


def parts(code: Code, begin: Any, end: Any) -> tuple[tuple[Any, Any, int], ...]:
    """Emit code that divides the indices from `begin` to `end` - 1 into a range of tiles of TILE indices and a
    remainder of single indices; return (begin, end, step) of both ranges."""
    middle = code.sub(end, code.urem(code.sub(end, begin), INT(TILE)))
    return (begin, middle, TILE), (middle, end, 1)


def widened(code: Code, x: Any, dtype: str, size: Any) -> Any:
    """Emit code that copies the first `size` numbers of x as fp32; return the address of the copy."""
    unit = Unit()
    copy = code.ptrtoint(code.alloca(FLOATS, size=code.add(code.udiv(size, INT(LANES)), INT(1))), INT)
    with code.loop(0, size, LANES) as (index, _):
        numbers = unit.read(code, x, dtype, index, code.sub(size, index))
        code.put(numbers, copy, "float32", index)
    return copy


def repeated(code: Code, address: Any, dtype: str, index: Any, count: int) -> Any:
    """Emit code that reads `count` numbers of a tensor from `index` on, and repeats them to fill a vector of LANES."""
    numbers = code.as_floats(code.vector(address, dtype, index, count), dtype)
    return shuffle(code, [i % count for i in range(LANES)], numbers)


def greatest(code: Code, a: Any, b: Any) -> Any:
    return code.select(code.icmp_signed(">", a, b), a, b)


def emit(weight_format: str, dtype: str, biased: bool, features: Mapping[str, bool] | None = None) -> Emit:
    """Return the function that emits the code of the kernel for products with a weight, for a CPU with these
    `features` (None: for this CPU). The kernel's arguments are ProductArguments; threads divide the outputs, rows of
    the weight."""
    unit = unit_for(dtype, features)
    return Product(weight_format, dtype, biased, unit, unit.dtype == "bfloat16" and has_matrix_unit(features)).emit


@cache
def products(weight_format: str, dtype: str, biased: bool, cpu: str | None = None) -> Kernel:
    """Compile the kernel for products with a weight in `weight_format` (float32, bfloat16, int8 or int4); x, y and, if
    `biased`, a bias are in `dtype` (float32 or bfloat16). `cpu` is LLVM's name of a CPU, by default this one. Return
    the kernel as a function whose arguments are the fields of ProductArguments."""
    return callable_kernel(ProductArguments, emit(weight_format, dtype, biased, {} if cpu else None), cpu)
