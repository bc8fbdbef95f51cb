"""Code of products y = x Wᵀ with x in bf16, for any number of rows, by the matrix unit of a CPU (see `matrix.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from onward.kernels.llvm import int4
from onward.kernels.llvm.code import FLOATS, INT, INTS, LANES, Code, integers
from onward.kernels.llvm.compiler import Values
from onward.kernels.llvm.matrix import ROW, TILE_BYTES, WEIGHT, MatrixUnit, X, memory, pack, transposed
from onward.kernels.llvm.units import PAIRS, shuffle

OUTPUTS = LANES * len(WEIGHT)  # rows of the weight that are multiplied in one pass over the inputs
Y = len(WEIGHT) * TILE_BYTES  # bytes of the products of a tile of x
FEW = LANES // 3  # rows of x whose three int8 digits fit into one tile
INPUTS = 2 * PAIRS  # the number of inputs is a multiple of this
MOST_INPUTS = 1 << 17  # from here on, the sums of products in int8 could overflow
BLOCK = 1 << 19  # elements of x that stay in a core's cache while it reads the weight
Finish = Callable[[Code, Values, Any, Any, int], Any]  # see `Product.finished`


class MatrixProduct:
    """The code of products with a weight in bf16. Tiles of the weight are read as it is stored, those of x are packed
    once; a subclass for each integer format unpacks the weight or packs x differently.

    A stored weight has `bits` bits, a number in a tile `size` bytes, and each group of LANES rows `parts` tiles of x.
    """

    bits, size, parts = 16, 2, 1

    def __init__(self, code: Code, given: Values, finish: Finish) -> None:
        self.code, self.given, self.finish, self.unit = code, given, finish, MatrixUnit(code, self.size == 1)
        self.tiles: Any = INT(self.parts)  # number of tiles of x for each group of rows
        self.length = code.mul(given.inputs, INT(self.size))  # bytes of a row in tiles
        groups = code.udiv(code.add(given.rows, INT(LANES - 1)), INT(LANES))
        # groups of LANES rows in a block: no more than there are, since their memory is on the thread's stack
        self.most = code.least(code.add(code.udiv(INT(BLOCK // LANES), given.inputs), INT(1)), groups)
        tiles = code.mul(self.most, INT(self.parts))
        self.x = memory(code, code.mul(tiles, code.mul(self.length, INT(LANES))))
        self.y = memory(code, code.mul(tiles, INT(Y)))

    def emit(self, first: Any, end: Any) -> None:
        """Emit code that multiplies all rows of x with the rows `first` to `end` - 1 of the weight."""
        code, given = self.code, self.given
        block = code.mul(self.most, INT(LANES))
        self.unit.begin()
        with code.loop(0, given.rows, block) as (begin, _):
            rows = code.least(block, code.sub(given.rows, begin))
            groups = code.udiv(code.add(rows, INT(LANES - 1)), INT(LANES))
            tiles = code.mul(groups, self.tiles)
            paired = code.and_(tiles, INT(-len(X)))
            with code.loop(0, groups) as (group, _):
                self.pack(group, code.add(begin, code.mul(group, INT(LANES))))
            with code.loop(first, end, OUTPUTS) as (start, _):
                # the last pass begins earlier: two threads may write the same outputs, with the same numbers
                output = code.least(start, code.sub(given.outputs, INT(OUTPUTS)))
                for head, last, count in (INT(0), paired, len(X)), (paired, tiles, 1):
                    with code.loop(head, last, count) as (tile, _):
                        self.multiply(output, tile, count, tiles)
                with code.loop(0, groups) as (group, _):
                    self.transpose(group)
                with code.loop(0, rows) as (row, _):
                    self.write(row, code.add(begin, row), output)
        self.unit.end()

    def multiply(self, output: Any, tile: Any, count: int, tiles: Any) -> None:
        """Emit code that writes to `y` the products of OUTPUTS rows of the weight, from row `output` on, and `count`
        of the `tiles` tiles of x, from number `tile` on."""
        code, unit = self.code, self.unit
        sums = range(count * len(WEIGHT))
        for number in sums:
            unit.clear(number)
        with code.loop(0, self.given.inputs, INPUTS) as (index, _):
            if self.bits < 16:
                with code.if_then(code.icmp_signed("==", tile, INT(0))):
                    self.prepare(output, index, tiles)
            for part in range(0, INPUTS * self.size, ROW):
                for i, register in enumerate(WEIGHT):
                    unit.load(register, *self.weight(output, i, index, part, tiles))
                for j, register in enumerate(X[:count]):
                    place = code.add(code.mul(index, INT(self.size)), INT(part))
                    unit.load(register, self.x_address(code.add(tile, INT(j)), place), INT(ROW))
                for number in sums:
                    j, i = divmod(number, len(WEIGHT))
                    unit.add(number, WEIGHT[i], X[j])
        for number in sums:
            unit.store(number, code.add(self.y_address(tile), INT(number * TILE_BYTES)))

    def x_address(self, tile: Any, place: Any) -> Any:
        """Emit code for the address of tile number `tile` of x from byte `place` of its rows on, a multiple of ROW."""
        code = self.code
        return code.add(self.x, code.mul(code.add(code.mul(tile, self.length), place), INT(LANES)))

    def y_address(self, tile: Any) -> Any:
        """Emit code for the address of the products of tile number `tile` of x."""
        return self.code.add(self.y, self.code.mul(tile, INT(Y)))

    def vectors(self, first: Any, index: Any) -> list[Any]:
        """Emit code that reads PAIRS numbers of each of LANES rows of x; beyond the last row, that row is repeated."""
        code, given = self.code, self.given
        last = code.sub(given.rows, INT(1))
        rows = [code.least(code.add(first, INT(i)), last) for i in range(LANES)]
        return [code.vector(given.x, "bfloat16", code.add(code.mul(row, given.inputs), index), PAIRS) for row in rows]

    def pack(self, group: Any, first: Any) -> None:
        """Emit code that packs a group of rows of x, which begins at row `first`."""
        with self.code.loop(0, self.given.inputs, PAIRS) as (index, _):
            target = self.x_address(group, self.code.mul(index, INT(self.size)))
            pack(self.code, self.vectors(first, index), target)

    def prepare(self, output: Any, index: Any, tiles: Any) -> None:
        """Emit code that prefetches INPUTS weights of each of the next OUTPUTS rows. Not called for bf16, whose longer
        rows the CPU prefetches itself."""
        code, given, size = self.code, self.given, OUTPUTS * self.bits // 8
        after = code.mul(code.add(output, INT(OUTPUTS)), given.inputs)
        place = code.add(code.lshr(code.mul(after, INT(self.bits)), INT(3)), code.mul(index, INT(size)))
        for line in range(0, INPUTS * size, ROW):
            code.prefetch(code.at(given.weight, "int8", code.add(place, INT(line))))

    def weight(self, output: Any, number: int, index: Any, part: int, tiles: Any) -> tuple[Any, Any]:
        """Emit code for the address of tile `number` of the weight, counted from row `output`, and the distance of its
        rows; the tile begins `part` bytes after input `index`."""
        code = self.code
        start = code.mul(code.add(output, INT(number * LANES)), self.length)
        place = code.add(code.mul(index, INT(self.size)), INT(part))
        return code.add(self.given.weight, code.add(start, place)), self.length

    def totals(self, group: Any, line: int) -> Any:
        """Emit code for the products of a group of rows of x with row `line` of the weight."""
        return self.code.floats(self.y_address(group), "float32", INT(line * LANES))

    def transpose(self, group: Any) -> None:
        """Emit code that replaces the sums of the first tile of a group of rows of x by the group's products, arranged
        by rows of x."""
        y = self.y_address(self.code.mul(group, INT(self.parts)))
        for start in range(0, OUTPUTS, LANES):
            totals = [self.totals(group, start + i) for i in range(LANES)]
            for i, vector in enumerate(transposed(self.code, totals)):
                put(self.code, vector, y, INT((start + i) * ROW))

    def write(self, place: Any, row: Any, output: Any) -> None:
        """Emit code that writes the products of row `row` of x, whose place in its block is `place`, to the result."""
        code, given = self.code, self.given
        y = self.y_address(code.mul(code.udiv(place, INT(LANES)), INT(self.parts)))
        for start in range(0, OUTPUTS, LANES):
            line = code.add(code.urem(place, INT(LANES)), INT(start))
            totals, at = code.floats(y, "float32", code.mul(line, INT(LANES))), code.add(output, INT(start))
            numbers = code.fptrunc(self.finish(code, given, totals, at, LANES), int4.HALF)
            put(code, numbers, given.y, code.mul(code.add(code.mul(row, given.outputs), at), INT(2)))


class Int4Product(MatrixProduct):
    """Products with an int4 weight, which is unpacked to bf16 together with the first products."""

    bits = 4

    def __init__(self, code: Code, given: Values, finish: Finish) -> None:
        super().__init__(code, given, finish)
        self.unpacked = memory(code, code.mul(self.bound(self.most, given.inputs), INT(OUTPUTS * 2)))

    def bound(self, tiles: Any, inputs: Any) -> Any:
        """Emit code for the number of inputs that are unpacked at a time: if the tiles of x are multiplied in one pass,
        so few that they stay in the L1 cache."""
        one = self.code.icmp_signed("<=", tiles, INT(len(X)))
        return self.code.select(one, INT(2 * INPUTS), inputs)

    def place(self, index: Any, tiles: Any) -> Any:
        """Emit code for the address of OUTPUTS rows of INPUTS unpacked numbers."""
        code = self.code
        mask = code.sub(self.bound(tiles, INT(0)), INT(1))
        return code.add(self.unpacked, code.mul(code.and_(index, mask), INT(OUTPUTS * 2)))

    def pack(self, group: Any, first: Any) -> None:
        """Emit code that packs a group of rows in the order of `int4.unpack_groups`."""
        code = self.code
        with code.loop(0, self.given.inputs, INPUTS) as (index, _):
            target = self.x_address(group, code.mul(index, INT(self.size)))
            for half in range(2):
                places = [i // 8 * TILE_BYTES + (8 * half + i % 8) * ROW for i in range(LANES)]
                pack(code, self.vectors(first, code.add(index, INT(half * PAIRS))), target, places)

    def prepare(self, output: Any, index: Any, tiles: Any) -> None:
        super().prepare(output, index, tiles)
        code, given = self.code, self.given
        target = self.place(index, tiles)
        with code.loop(0, OUTPUTS) as (row, _):
            start = code.add(code.mul(code.add(output, row), given.inputs), index)
            for i, vector in enumerate(int4.unpack_groups(code, given.weight, given.scales, start)):
                put(code, vector, target, code.add(code.mul(row, INT(2 * ROW)), INT(i * ROW)))

    def weight(self, output: Any, number: int, index: Any, part: int, tiles: Any) -> tuple[Any, Any]:
        return self.code.add(self.place(index, tiles), INT(number * LANES * 2 * ROW + part)), INT(2 * ROW)


MIDDLE = 0x808080  # adding it to an integer of three digits from -128 to 127 adds 128 to each digit
ROUNDING = 1.5 * 2.0**23  # adding it to a number below 2 ** 22 rounds the number to an integer
ROUNDED = 0x4B400000  # bits of ROUNDING; the bits of the sum are larger by the integer


class Int8Product(MatrixProduct):
    """Products with an int8 weight, which is read as it is stored. Each row of x is multiplied by a power of two and
    rounded to integers of 23 bits, whose three digits are multiplied as int8: the sums of their products are exact. A
    tile has one digit of each row of a group, or all digits of at most FEW rows."""

    bits, size, parts = 8, 1, 3

    def __init__(self, code: Code, given: Values, finish: Finish) -> None:
        super().__init__(code, given, finish)
        self.few = code.icmp_unsigned("<=", given.rows, INT(FEW))
        self.tiles = code.select(self.few, INT(1), INT(self.parts))
        self.digits = memory(code, INT(self.parts * TILE_BYTES))  # the digits of ROW inputs
        self.factors = memory(code, code.mul(self.most, INT(ROW)))  # by which each row's sums are multiplied
        self.scales = memory(code, INT(ROW))  # by which each row of a group is multiplied before rounding

    def pack(self, group: Any, first: Any) -> None:
        code, given = self.code, self.given
        rows = code.least(code.sub(given.rows, first), INT(LANES))
        distance = code.select(self.few, INT(FEW), INT(LANES))  # rows of tiles between the digits of a row of x
        # 0 for rows that do not exist, because multiplying by a denormal number takes long
        put(code, integers(0), self.factors, code.mul(group, INT(ROW)))
        with code.loop(0, rows) as (lane, _):
            self.scale(group, lane, code.mul(code.add(first, lane), given.inputs))
        with code.loop(0, given.inputs, ROW) as (index, _):
            with code.loop(0, rows) as (lane, _):
                start = code.add(code.mul(code.add(first, lane), given.inputs), index)
                scale = code.repeat(code.scalar(self.scales, "float32", lane))
                for i in range(0, ROW, LANES):
                    numbers = code.floats(given.x, "bfloat16", code.add(start, INT(i)))
                    bits = code.bitcast(code.fma(numbers, scale, ir.Constant(FLOATS, [ROUNDING] * LANES)), INTS)
                    bits = code.xor(code.sub(bits, integers(ROUNDED - MIDDLE)), integers(MIDDLE))
                    for part in range(self.parts):
                        digits = code.trunc(code.lshr(bits, integers(8 * part)), ir.VectorType(ir.IntType(8), LANES))
                        row = code.add(lane, code.mul(distance, INT(part)))
                        put(code, digits, self.digits, code.add(code.mul(row, INT(ROW)), INT(i)))
            with code.loop(0, self.tiles) as (part, _):
                digits = code.add(self.digits, code.mul(part, INT(TILE_BYTES)))
                vectors = [code.vector(digits, "int32", INT(i * LANES), LANES) for i in range(LANES)]
                pack(code, vectors, self.x_address(code.add(code.mul(group, INT(self.parts)), part), index))

    def scale(self, group: Any, lane: Any, start: Any) -> None:
        """Emit code for the scale and the factor, powers of two, of row `lane` of a group; the row begins at number
        `start` of x. Unless all numbers of the row are tiny, the largest becomes at least 2 ** 21. The factor is NaN if
        the row has a number that is not finite."""
        code, word = self.code, ir.IntType(32)
        with code.loop(0, self.given.inputs, LANES, [integers(0)]) as (index, peaks):
            bits = code.bitcast(code.floats(self.given.x, "bfloat16", code.add(start, index)), INTS)
            bits = code.and_(bits, integers(0x7FFFFFFF))
            peaks[0] = code.select(code.icmp_signed(">", bits, peaks[0]), bits, peaks[0])
        peak = code.intrinsic(f"llvm.vector.reduce.smax.v{LANES}i32", word, [peaks[0]])
        exponent = code.lshr(peak, word(23))
        exponent = code.select(code.icmp_signed("<", exponent, word(22)), word(22), exponent)  # for tiny numbers
        finite = code.icmp_signed("<", exponent, word(255))
        factor = code.select(finite, code.shl(code.sub(exponent, word(21)), word(23)), word(0x7FC00000))
        code.store(code.shl(code.sub(word(275), exponent), word(23)), code.at(self.scales, "int32", lane))
        code.store(factor, code.at(self.factors, "int32", code.add(code.mul(group, INT(LANES)), lane)))

    def totals(self, group: Any, line: int) -> Any:
        code, base = self.code, ir.Constant(FLOATS, [256.0] * LANES)
        y = self.y_address(code.mul(group, INT(self.parts)))
        vectors = [code.vector(y, "int32", INT(line * LANES + part * Y // 4), LANES) for part in range(self.parts)]

        def sums(part: int) -> Any:
            of_few = shuffle(code, [(i + part * FEW) % LANES for i in range(LANES)], vectors[0])
            return code.sitofp(code.select(self.few, of_few, vectors[part]), FLOATS)

        factors = code.floats(self.factors, "float32", code.mul(group, INT(LANES)))
        return code.fmul(code.fma(code.fma(sums(2), base, sums(1)), base, sums(0)), factors)


def is_tiled(code: Code, given: Values) -> Any:
    """Emit code that tests whether a weight has a size that these products support."""
    whole = code.icmp_signed("==", code.urem(given.inputs, INT(INPUTS)), INT(0))
    wide = code.icmp_signed(">=", given.outputs, INT(OUTPUTS))
    return code.and_(code.and_(whole, wide), code.icmp_signed("<", given.inputs, INT(MOST_INPUTS)))


def supports(inputs: int, outputs: int) -> bool:
    """Whether a weight (outputs, inputs) has a size that these products support, as `is_tiled` tests at run time."""
    return inputs % INPUTS == 0 and outputs >= OUTPUTS and inputs < MOST_INPUTS


def put(code: Code, vector: Any, address: Any, place: Any) -> None:
    """Emit code that writes a vector to memory, `place` bytes after an address."""
    code.store(vector, code.bitcast(code.at(address, "int8", place), vector.type.as_pointer()), align=1)


FORMATS = {"bfloat16": MatrixProduct, "int8": Int8Product, "int4": Int4Product}  # by the weight's format
