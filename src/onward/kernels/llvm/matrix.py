"""The matrix unit of a CPU (AMX): one instruction multiplies 16 rows of x with 16 rows of a weight.

The unit has eight tiles of 16 rows of 64 bytes. A tile of the weight is read as it is stored; in a tile of x, a row has
four neighboring bytes, two inputs in bf16 or four in int8, of 16 rows of x. The product of both is a tile of y,
transposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from llvmlite import ir

from onward.kernels.llvm.code import FLOATS, INT, INTS, LANES, Code
from onward.kernels.llvm.compiler import host_features
from onward.kernels.llvm.units import shuffle

ROW = 64  # bytes of a row of a tile
TILE_BYTES = LANES * ROW
WEIGHT, X = (4, 5), (6, 7)  # tile numbers; tiles 0 to 3 are for y
PALETTE = [1, *[0] * 15, *[ROW, 0] * 8, *[0] * 16, *[LANES] * 8, *[0] * 8]  # all tiles have their full size


def has_matrix_unit(features: Mapping[str, bool] | None) -> bool:
    """Whether kernels may use the matrix unit for bf16 and int8: False for a CPU with given `features`; with None,
    whether this CPU has the unit and the system lets this process use it."""
    if features is not None:
        return False
    found = host_features()
    return bool(found.get("amx-bf16") and found.get("amx-int8")) and bool(torch.cpu._init_amx())


class MatrixUnit:
    """The instructions of the matrix unit, emitted by `code`, between `begin` and `end`, for tiles of int8 (`integer`)
    or bf16. `end` restores the thread's configuration of the tiles, since other libraries, such as llama.cpp, set
    theirs only once per thread."""

    def __init__(self, code: Code, integer: bool) -> None:
        self.code, self.integer = code, integer

    def begin(self) -> None:
        self.before = self.address(self.code.alloca(ir.ArrayType(ir.IntType(8), 64)))
        self.call("sttilecfg", self.before)
        values = ir.Constant(ir.ArrayType(ir.IntType(8), 64), PALETTE)
        palette = self.code.module.globals.get("palette")
        if palette is None:
            palette = ir.GlobalVariable(self.code.module, values.type, "palette")
            palette.initializer, palette.global_constant, palette.linkage = values, True, "internal"
        self.call("ldtilecfg", self.address(palette))

    def end(self) -> None:
        self.call("ldtilecfg", self.before)

    def address(self, variable: Any) -> Any:
        return self.code.bitcast(variable, ir.IntType(8).as_pointer())

    def clear(self, tile: int) -> None:
        """Emit code that fills a tile with zeros."""
        self.call("tilezero", ir.IntType(8)(tile))

    def load(self, tile: int, address: Any, stride: Any) -> None:
        """Emit code that reads a tile whose rows are `stride` bytes apart."""
        self.call("tileloadd64", ir.IntType(8)(tile), self.code.at(address, "int8", 0), stride)

    def store(self, tile: int, address: Any) -> None:
        self.call("tilestored64", ir.IntType(8)(tile), self.code.at(address, "int8", 0), INT(ROW))

    def add(self, y: int, weight: int, x: int) -> None:
        """Emit code that adds the product of the tiles `weight` and `x` to the tile `y`, in fp32 or int32."""
        self.call("tdpbssd" if self.integer else "tdpbf16ps", *map(ir.IntType(8), (y, weight, x)))

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


def pack(code: Code, rows: Sequence[Any], address: Any, places: Sequence[int] = range(0, TILE_BYTES, ROW)) -> None:
    """Emit code that writes a tile of x to memory, given a vector of ROW bytes for each of LANES rows of x; `places`
    are the offsets of the tile's rows from the address, in bytes."""
    for place, numbers in zip(places, transposed(code, [code.bitcast(row, INTS) for row in rows])):
        code.store(numbers, code.bitcast(code.at(address, "int8", place), INTS.as_pointer()), align=1)


def memory(code: Code, size: Any) -> Any:
    """Emit code that allocates `size` bytes, a multiple of ROW, on the stack; return their address."""
    return code.ptrtoint(code.alloca(FLOATS, size=code.udiv(size, INT(ROW))), INT)
