"""Runs every kernel with bounds checks: each memory access is compared with the operands whose addresses were passed.

`python -m support.bounds` prints the number of accesses, with exit status 1 if an access is outside the operands.
"""

import ctypes
import sys
from array import array
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from torch import Tensor

from onward.kernels import memory
from onward.kernels.llvm import compiler
from onward.kernels.llvm.code import INT, Code
from onward.kernels.llvm.compiler import Arguments, Emit

RANGES: list[tuple[int, int]] = []  # sorted (start, end) addresses of the operands; end is exclusive
NEAR = 200  # number of operands before an accessed address that are compared with it
counts = {"accesses": 0, "outside": 0}


def allow(start: int, size: int) -> None:
    insort(RANGES, (start, start + size))


def check(start: int, size: int) -> None:
    counts["accesses"] += 1
    at = bisect_right(RANGES, (start, sys.maxsize))
    if size and not any(start + size <= end for _, end in RANGES[max(0, at - NEAR) : at]):
        counts["outside"] += 1


CALLBACKS = {
    name: ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(f) for name, f in (("check", check), ("allow", allow))
}


class CheckedCode(Code):
    """Calls `check` before each access of a kernel to its operands, `allow` for memory on its stack."""

    checked = False

    def note(self, name: str, pointer: ir.Value, size: ir.Value) -> None:
        if self.checked:
            kind = ir.FunctionType(ir.VoidType(), [INT, INT])
            function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
            self.call(function, [self.ptrtoint(pointer, INT), size])

    def size_of(self, kind: ir.Type) -> ir.Value:
        return self.ptrtoint(self.gep(ir.Constant(kind.as_pointer(), None), [INT(1)]), INT)

    def load(self, ptr: ir.Value, *args: Any, **options: Any) -> ir.Value:
        self.note("check", ptr, self.size_of(ptr.type.pointee))
        return super().load(ptr, *args, **options)

    def store(self, value: ir.Value, ptr: ir.Value, *args: Any, **options: Any) -> ir.Value:
        self.note("check", ptr, self.size_of(value.type))
        return super().store(value, ptr, *args, **options)

    def alloca(self, typ: ir.Type, size: Any = None, name: str = "") -> ir.Value:
        pointer, count = super().alloca(typ, size, name), INT(1) if size is None else size
        self.note("allow", pointer, self.mul(self.size_of(typ), count))
        return pointer

    def intrinsic(self, name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
        if name.startswith("llvm.masked.load"):
            source, _, mask, _ = arguments
            kind = ir.IntType(mask.type.count)
            count = self.intrinsic(f"llvm.ctpop.i{kind.width}", kind, [self.bitcast(mask, kind)])
            if kind.width != INT.width:
                count = (self.zext if kind.width < INT.width else self.trunc)(count, INT)
            self.note("check", source, self.mul(count, self.size_of(result.element)))
        return super().intrinsic(name, result, arguments)


def compile_checked() -> None:
    """Make the compiler and the allocator report to `check`; must be called before the modules that use them are
    imported."""
    for name, callback in CALLBACKS.items():
        llvm.add_symbol(name, ctypes.cast(callback, ctypes.c_void_p).value)
    add_kernel, address, strided, rows = (
        compiler.add_kernel,
        memory.address,
        memory.strided_address,
        memory.rows_address,
    )
    buffer, filled = memory.buffer, memory.filled

    def checked_kernel(module: ir.Module, name: str, structure: type[Arguments], emit: Emit) -> None:
        def checked(code: CheckedCode, *arguments: Any) -> None:
            code.checked = True
            emit(code, *arguments)

        add_kernel(module, name, structure, checked)

    def whole(tensor: Tensor) -> None:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        allow(tensor.data_ptr(), (last + 1) * tensor.element_size() if tensor.numel() else 0)

    def checked_buffer(*form: Any) -> tuple[Tensor, int]:
        found = buffer(*form)
        whole(found[0])
        return found

    def checked_filled(*form: Any) -> "tuple[array[Any], int]":
        numbers, pointer = filled(*form)
        allow(pointer, len(numbers) * numbers.itemsize)
        return numbers, pointer

    def checked_address(tensor: Tensor | None, *form: Any) -> int:
        found = address(tensor, *form)
        if tensor is not None:
            whole(tensor)
        return found

    def checked_strided(tensor: Tensor) -> int:
        found = strided(tensor)
        whole(tensor)
        return found

    def checked_rows(tensor: Tensor, *form: Any) -> tuple[int, int]:
        found = rows(tensor, *form)
        whole(tensor)
        return found

    for module, name, value in (
        (compiler, "Code", CheckedCode),
        (compiler, "add_kernel", checked_kernel),
        (memory, "buffer", checked_buffer),
        (memory, "filled", checked_filled),
        (memory, "address", checked_address),
        (memory, "strided_address", checked_strided),
        (memory, "rows_address", checked_rows),
    ):
        setattr(module, name, value)


def assert_an_access_outside_is_noticed() -> None:
    def emit(code: Any, given: Any, first: Any, end: Any) -> None:
        with code.loop(first, end) as (index, _):
            code.put(code.scalar(given.x, "float32", index), given.x, "float32", index)

    kernel, tensor = compiler.callable_kernel(compiler.arguments("Copied", "x"), emit), torch.zeros(8)
    kernel(memory.address(tensor[:4], torch.float32, 4), 4, 1)
    assert counts == {"accesses": 8, "outside": 0}
    kernel(memory.address(tensor[:4], torch.float32, 4), 5, 1)
    assert counts["outside"] == 2
    counts["outside"] = 0


def main() -> int:
    compile_checked()
    assert_an_access_outside_is_noticed()
    from support.guard import kernels_used
    from support.kernels import CASES

    for name, case in CASES.items():
        before = dict(counts)
        torch.manual_seed(0)
        with kernels_used() as allocator:
            for _ in case(allocator):
                pass
        accesses, outside = (counts[key] - before[key] for key in counts)
        print(f"{name}: {accesses:,} accesses, {outside} outside")
        RANGES.clear()
    return int(counts["outside"] > 0)


if __name__ == "__main__":
    sys.exit(main())
