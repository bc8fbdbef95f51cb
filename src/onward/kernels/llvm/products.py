"""Code of products with a weight, y = x Wᵀ + bias: limited by memory for few rows of x, by arithmetic for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from onward.kernels.llvm import int4
from onward.kernels.llvm.code import FLOATS, INT, LANES, Code
from onward.kernels.llvm.compiler import Emit, Values, arguments, callable_kernel
from onward.kernels.llvm.units import ZERO, Unit, shuffle, sums, unit_for
from onward.kernels.memory import Kernel

TILE = 4  # rows of x, and of the weight, in one pass over the inputs: their sums fit into the registers
PREFETCHED = 48  # rows of x from which prefetching the weight costs more time than it saves
UNPACKED = 8  # rows of x from which prefetching integers saves time: one tile of x leaves too little time for it
GROUP = 40_000  # bytes of a tile of x, and of the rows of the weight that are multiplied with it in turn
SIZES = {"float32": 4, "bfloat16": 2}  # bytes of a number
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
LINE = 64  # bytes of a line of memory
BLOCK = 1 << 18  # numbers of x that stay in a core's cache while the rows of the weight pass
ProductArguments = arguments("ProductArguments", "x", "weight", "scales", "bias", "y", "rows", "outputs", "inputs")


class Matrix(NamedTuple):
    """A matrix while the code of a kernel is emitted: the memory address and the dtype of its contiguous rows of
    numbers."""

    address: Any
    dtype: str


class Ahead(NamedTuple):
    """The part of a weight that is prefetched, as it is stored: its address, and the bytes to prefetch for each input
    of a tile."""

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

    def emit(self, code: Code, given: Values, first: Any, end: Any) -> None:
        """Emit code that multiplies all rows of x with the rows `first` to `end` - 1 of the weight; `given` are the
        kernel's arguments."""
        with code.if_else(code.icmp_signed("<", given.rows, INT(TILE))) as (few, many):
            with few:
                self.few_rows(code, given, first, end)
            order, bound = (">=", UNPACKED) if self.unpacked else ("<", PREFETCHED)
            with many, code.if_else(code.icmp_signed(order, given.rows, INT(bound))) as (fetching, other):
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
        x, weight, unit = Matrix(given.x, self.dtype), Matrix(given.weight, self.weight_format), self.unit
        rows, inputs, prepared, chains = given.rows, given.inputs, None, 4 if self.weight_format == "int8" else 1
        if self.weight_format == "int4":
            unit = int4.unit_of(unit)
            prepared = int4.prepare(code, unit, given.x, self.dtype, rows, inputs)
        elif self.weight_format == "int8" and self.dtype == "bfloat16":  # fp32 is made of integers in fewer steps
            x, unit = Matrix(widened(code, x, code.mul(rows, inputs)), "float32"), Unit()
        with code.loop(first, end) as (output, _), code.loop(0, rows) as (row, _):
            if prepared is not None:
                partials = [int4.dot(code, unit, prepared, row, given.weight, given.scales, output, inputs)]
            else:
                indices = [self.x_index(code, given, row)], [code.mul(output, inputs)]
                partials = tile(code, unit, x, indices[0], weight, indices[1], inputs, chains=chains)
            self.store(code, given, partials, row, 1, output, 1)

    def many_rows(self, code: Code, given: Values, first: Any, end: Any, prefetches: bool) -> None:
        """Emit code for the products of `few_rows` in tiles: the rows of x are divided into blocks, and each block is
        multiplied with all rows of the weight, a group of which stays in a core's first cache. `prefetches`: whether
        the next group is prefetched meanwhile."""
        rows, inputs, weight = given.rows, given.inputs, Matrix(given.weight, self.weight_format)
        block = code.mul(code.add(code.udiv(INT(BLOCK // TILE), inputs), INT(1)), INT(TILE))
        tiles = code.udiv(INT(GROUP // (TILE * SIZES[self.unit.dtype])), inputs)  # with that of x
        group = code.mul(greatest(code, code.sub(tiles, INT(1)), INT(1)), INT(TILE))
        if self.unpacked:
            group = INT(TILE)  # more of them, unpacked at a time, are slower up to 8 rows
            vectors = code.udiv(code.add(code.mul(inputs, group), INT(2 * self.unit.step)), INT(self.unit.step))
            weight = Matrix(code.ptrtoint(code.alloca(self.unit.vector, size=vectors), INT), self.unit.dtype)
        with code.loop(0, rows, block) as (begin, _), code.loop(first, end, group) as (start, _):
            stop, to = least(code, code.add(begin, block), rows), least(code, code.add(start, group), end)
            if self.unpacked:
                self.unpack(code, given, weight.address, start, code.sub(to, start))
            base = start if self.unpacked else INT(0)
            self.tiles(code, given, weight, base, (begin, stop), (start, to), group if prefetches else None)

    def unpack(self, code: Code, given: Values, target: Any, output: Any, outputs: Any) -> None:
        """Emit code that converts `outputs` rows of an int8 or int4 weight, from row `output` on, to the dtype of the
        arithmetic, and writes them at the address `target`."""
        inputs, unit = given.inputs, self.unit
        width = int4.GROUP if self.weight_format == "int4" else unit.step
        begin, size = code.mul(output, inputs), code.mul(inputs, outputs)
        full_end = code.sub(size, code.urem(size, INT(width)))
        for start, end, ragged in (INT(0), full_end, False), (full_end, size, True):
            with code.loop(start, end, width) as (index, _):
                place = code.add(begin, index)
                if self.weight_format == "int4":
                    vectors = int4.unpack(code, unit, given.weight, given.scales, place)
                else:
                    left = code.sub(size, index) if ragged else None
                    vectors = [unit.read(code, given.weight, "int8", place, left)]
                for i, vector in enumerate(vectors):
                    pointer = code.at(target, unit.dtype, code.add(index, INT(i * unit.step)))
                    code.store(vector, code.bitcast(pointer, vector.type.as_pointer()), align=1)

    def tiles(
        self,
        code: Code,
        given: Values,
        weight: Matrix,
        base: Any,
        rows: tuple[Any, Any],
        outputs: tuple[Any, Any],
        ahead: Any,
    ) -> None:
        """Emit code that multiplies the rows of x in the range `rows` (begin, end) with the rows of the weight in the
        range `outputs` (begin, end), tile by tile; the first row in the matrix `weight` is that of output `base`. While
        a tile is multiplied, the code prefetches the tile `ahead` outputs later (None: no prefetch)."""
        inputs, x = given.inputs, Matrix(given.x, self.dtype)
        for row_start, row_end, size in parts(code, *rows):
            with code.loop(row_start, row_end, size) as (row, _):
                x_indices = [self.x_index(code, given, code.add(row, INT(i))) for i in range(size)]
                for begin, end, width in parts(code, *outputs):
                    with code.loop(begin, end, width) as (output, _):
                        first = code.sub(output, base)
                        indices = [code.mul(code.add(first, INT(i)), inputs) for i in range(width)]
                        later = None
                        if ahead is not None and size == width == TILE:
                            bits = BITS[self.weight_format]
                            start = code.mul(code.mul(code.add(output, ahead), inputs), INT(bits))
                            later = Ahead(code.add(given.weight, code.lshr(start, INT(3))), TILE * bits // 8)
                        partials = tile(code, self.unit, x, x_indices, weight, indices, inputs, later)
                        self.store(code, given, partials, row, size, output, width)

    def store(
        self, code: Code, given: Values, vectors: Sequence[Any], row: Any, rows: int, output: Any, outputs: int
    ) -> None:
        """Emit code that writes a tile of y, `rows` rows and `outputs` columns from (row, output) on, given a vector of
        partial sums for each number, row by row."""
        totals = sums(code, vectors)
        if self.weight_format == "int8":
            totals = code.fmul(totals, repeated(code, given.scales, "float32", output, outputs))
        if self.biased:
            totals = code.fadd(totals, repeated(code, given.bias, self.dtype, output, outputs))
        for i in range(rows):
            numbers = shuffle(code, [i * outputs + j for j in range(outputs)], totals)
            place = code.add(self.y_index(code, given, code.add(row, INT(i))), output)
            code.put(numbers, given.y, self.dtype, place)


def tile(
    code: Code,
    unit: Unit,
    x: Matrix,
    x_indices: Sequence[Any],
    weight: Matrix,
    indices: Sequence[Any],
    inputs: Any,
    ahead: Ahead | None = None,
    chains: int = 1,
) -> list[Any]:
    """Emit code that multiplies rows of x with rows of the weight, each of `inputs` numbers; return the vectors of
    partial sums. `x_indices` and `indices` are the indices of the first numbers of these rows in x and in the weight.

    `ahead`: the part of the weight that is prefetched meanwhile; all passes over the same rows of the weight prefetch
    the same, since to skip it costs more. An addition waits for the previous one of its sum: where a tile has few sums,
    each is divided into `chains` sums.
    """
    count = len(x_indices) * len(indices)
    wide, full_end = (code.sub(inputs, code.urem(inputs, INT(n))) for n in (unit.step * chains, unit.step))

    def add(index: Any, totals: list[Any], left: Any) -> None:
        weights = [unit.read(code, weight.address, weight.dtype, code.add(place, index), left) for place in indices]
        for i, place in enumerate(x_indices):
            numbers = unit.read(code, x.address, x.dtype, code.add(place, index), left)
            for j, vector in enumerate(weights):
                totals[i * len(indices) + j] = unit.add(code, vector, numbers, totals[i * len(indices) + j])

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
    """Emit code that divides the indices from `begin` to `end` - 1 into a range of tiles of TILE indices and a rest of
    single ones; return (begin, end, step) of both ranges."""
    middle = code.sub(end, code.urem(code.sub(end, begin), INT(TILE)))
    return (begin, middle, TILE), (middle, end, 1)


def widened(code: Code, x: Matrix, size: Any) -> Any:
    """Emit code that copies the first `size` numbers of x as fp32; return the address of the copy."""
    unit = Unit()
    copy = code.ptrtoint(code.alloca(FLOATS, size=code.add(code.udiv(size, INT(LANES)), INT(1))), INT)
    with code.loop(0, size, LANES) as (index, _):
        numbers = unit.read(code, x.address, x.dtype, index, code.sub(size, index))
        code.put(numbers, copy, "float32", index)
    return copy


def repeated(code: Code, address: Any, dtype: str, index: Any, count: int) -> Any:
    """Emit code that reads `count` numbers of a tensor from `index` on, and repeats them to fill a vector of LANES."""
    numbers = code.as_floats(code.vector(address, dtype, index, count), dtype)
    return shuffle(code, [i % count for i in range(LANES)], numbers)


def greatest(code: Code, a: Any, b: Any) -> Any:
    return code.select(code.icmp_signed(">", a, b), a, b)


def least(code: Code, a: Any, b: Any) -> Any:
    return code.select(code.icmp_signed("<", a, b), a, b)


def emit(weight_format: str, dtype: str, biased: bool, features: Mapping[str, bool] | None = None) -> Emit:
    """Return the function that emits the code of the kernel for products with a weight, for a CPU with these
    `features` (None: for this CPU). The kernel's arguments are ProductArguments; threads divide the outputs, rows of
    the weight."""
    return Product(weight_format, dtype, biased, unit_for(dtype, features)).emit


@cache
def products(weight_format: str, dtype: str, biased: bool, cpu: str | None = None) -> Kernel:
    """Compile the kernel for products with a weight in `weight_format` (float32, bfloat16, int8 or int4); x, y and, if
    `biased`, a bias are in `dtype` (float32 or bfloat16). `cpu` is LLVM's name of a CPU, by default this one. Return
    the kernel as a function whose arguments are the fields of ProductArguments."""
    return callable_kernel(ProductArguments, emit(weight_format, dtype, biased, {} if cpu else None), cpu)
