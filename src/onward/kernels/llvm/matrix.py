"""Code of products by the matrix unit of a CPU (AMX): one instruction multiplies 16 rows of x with 16 rows of a weight.

The unit has eight tiles of 16 rows of 64 bytes. A tile of the weight is read as it is stored. Each row of a tile of x
has a pair of neighboring inputs of 16 rows of x. The product of both tiles is a transposed tile of y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from llvmlite import ir

from onward.kernels.llvm.code import FLOATS, INT, INTS, LANES, Code
from onward.kernels.llvm.compiler import host_features
from onward.kernels.llvm.units import PAIRS, ZERO, shuffle

ROW = 64  # bytes of a row of a tile
TILE_BYTES = LANES * ROW
OUTPUTS = 2 * LANES  # rows of the weight that are multiplied in one pass over the inputs
INPUTS = PAIRS  # inputs in a tile, in bf16
Y, WEIGHT, X = (0, 1, 2, 3), (4, 5), (6, 7)  # tile numbers of y, weight and x
PALETTE = [1, *[0] * 15, *[ROW, 0] * 8, *[0] * 16, *[LANES] * 8, *[0] * 8]  # all tiles have their full size


def has_matrix_unit(features: Mapping[str, bool] | None) -> bool:
    """Whether kernels may use the matrix unit for bf16: False for a CPU with given `features`; with None, whether this
    CPU has the unit and the system lets this process use it."""
    if features is not None:
        return False
    return bool(host_features().get("amx-bf16")) and bool(torch.cpu._init_amx())


class MatrixUnit:
    """The instructions of the matrix unit, emitted by `code`, between `begin` and `end`."""

    def __init__(self, code: Code) -> None:
        self.code = code

    def begin(self) -> None:
        values = ir.Constant(ir.ArrayType(ir.IntType(8), 64), PALETTE)
        palette = self.code.module.globals.get("palette")
        if palette is None:
            palette = ir.GlobalVariable(self.code.module, values.type, "palette")
            palette.initializer, palette.global_constant, palette.linkage = values, True, "internal"
        self.call("ldtilecfg", self.code.bitcast(palette, ir.IntType(8).as_pointer()))

    def end(self) -> None:
        self.call("tilerelease")

    def load(self, tile: int, address: Any, stride: Any) -> None:
        """Emit code that reads a tile whose rows are `stride` bytes apart."""
        self.call("tileloadd64", ir.IntType(8)(tile), self.code.at(address, "int8", 0), stride)

    def store(self, tile: int, address: Any) -> None:
        self.call("tilestored64", ir.IntType(8)(tile), self.code.at(address, "int8", 0), INT(ROW))

    def add(self, y: int, weight: int, x: int) -> None:
        """Emit code that adds the product of the tiles `weight` and `x`, in bf16, to the tile `y`, in fp32."""
        self.call("tdpbf16ps", *map(ir.IntType(8), (y, weight, x)))

    def call(self, name: str, *arguments: Any) -> None:
        self.code.intrinsic(f"llvm.x86.{name}", ir.VoidType(), arguments)


def transposed(code: Code, rows: Sequence[Any]) -> list[Any]:
    """Emit code that transposes a matrix of LANES rows, vectors of LANES numbers of 32 bits."""
    vectors, lanes = list(rows), range(LANES)
    for step in (8, 4, 2, 1):
        for i in (i for i in lanes if not i & step):
            pair = vectors[i], vectors[i + step]
            vectors[i] = shuffle(code, [LANES + n - step if n & step else n for n in lanes], *pair)
            vectors[i + step] = shuffle(code, [LANES + n if n & step else n + step for n in lanes], *pair)
    return vectors


def pack(code: Code, rows: Sequence[Any], address: Any) -> None:
    """Emit code that writes a tile of x to memory, given a vector of INPUTS bf16 numbers of each of its LANES rows."""
    for i, pairs in enumerate(transposed(code, [code.bitcast(row, INTS) for row in rows])):
        code.store(pairs, code.bitcast(code.at(address, "int8", i * ROW), INTS.as_pointer()), align=1)


def multiply(
    code: Code, weight: tuple[Any, Any], x: Sequence[Any], inputs: tuple[Any, Any], y: Any, ahead: tuple[Any, int]
) -> None:
    """Emit code that multiplies OUTPUTS rows of the weight with tiles of LANES rows of x, over a range of inputs
    (begin, end), and adds their transposed products to `y`: for each tile of x, a tile for each LANES outputs. `weight`
    is the address of the weight's first number in the range and the row stride in bytes; `x` has the address of the
    packed tiles of each LANES rows. `ahead`, an address and the number of bytes for each tile of inputs, is prefetched
    meanwhile."""
    unit, (address, stride), (begin, end) = MatrixUnit(code), weight, inputs
    tiles = [(tile, tile % len(WEIGHT), tile // len(WEIGHT)) for tile in Y[: len(x) * len(WEIGHT)]]
    for tile, *_ in tiles:
        unit.load(tile, code.add(y, INT(tile * TILE_BYTES)), INT(ROW))
    with code.loop(begin, end, INPUTS) as (index, _):
        start = code.mul(code.udiv(index, INT(INPUTS)), INT(ahead[1]))
        for line in range(0, ahead[1], ROW):
            code.prefetch(code.at(ahead[0], "int8", code.add(start, INT(line))))
        place = code.mul(index, INT(TILE_BYTES // INPUTS))
        for tile, packed in zip(X, x):
            unit.load(tile, code.add(packed, place), INT(ROW))
        first = code.add(address, code.mul(code.sub(index, begin), INT(2)))
        for i, tile in enumerate(WEIGHT):
            unit.load(tile, code.add(first, code.mul(stride, INT(i * LANES))), stride)
        for tile, i, j in tiles:
            unit.add(tile, WEIGHT[i], X[j])
    for tile, *_ in tiles:
        unit.store(tile, code.add(y, INT(tile * TILE_BYTES)))


def tile_of_y(code: Code, y: Any, number: Any) -> Any:
    """Emit code for the address of the first tile of y for tile `number` of x."""
    return code.add(y, code.mul(number, INT(len(WEIGHT) * TILE_BYTES)))


def clear(code: Code, y: Any, tiles: Any) -> None:
    """Emit code that fills the tiles of y for `tiles` tiles of x with zeros."""
    with code.loop(0, code.mul(tiles, INT(len(WEIGHT) * LANES * LANES)), LANES) as (index, _):
        code.put(ZERO, y, "float32", index)


def read(code: Code, y: Any, tile: int) -> list[Any]:
    """Emit code that reads a tile of the products that `multiply` wrote to y: a vector of LANES outputs for each
    row."""
    return transposed(code, [code.floats(y, "float32", tile * LANES * LANES + i * LANES) for i in range(LANES)])


def memory(code: Code, size: Any) -> Any:
    """Emit code that allocates `size` bytes, a multiple of ROW, on the stack; return their address."""
    return code.ptrtoint(code.alloca(FLOATS, size=code.udiv(size, INT(ROW))), INT)
