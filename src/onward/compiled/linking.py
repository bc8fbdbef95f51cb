"""Linking: compile the kernels of lowered calls, and write the addresses of kernels and arguments into one table."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir

from onward.compiled.calls import Call
from onward.kernels.llvm.code import BYTES, INT, Code
from onward.kernels.llvm.compiler import add_kernel, load

KERNELS: dict[tuple[Any, ...], int] = {}  # the addresses of compiled kernels, by the key of their calls
MODULES: list[Any] = []  # modules that own the kernels' machine code


class LinkedCalls:
    """Compiled kernel calls with their arguments in memory; `run` calls the kernels one after the other. A `folder`
    caches the machine code for the next start of the program (None: no caching)."""

    def __init__(self, calls: Sequence[Call], folder: Path | None) -> None:
        self.calls, addresses = calls, list[int]()
        place_in_one_block(calls)
        for kernel, call in zip(kernel_addresses(calls, folder), calls):
            addresses += kernel, ctypes.addressof(call.arguments)
        self.table = (ctypes.c_int64 * len(addresses))(*addresses)

    def run(self) -> None:
        sequence()(ctypes.addressof(self.table), len(self.calls))


def place_in_one_block(calls: Sequence[Call]) -> None:
    """Move the arguments of all kernel calls to one block of memory, in the order in which kernels read them: a run of
    many small kernels takes 8% less time than with scattered arguments."""
    block, start = ctypes.create_string_buffer(b"".join(bytes(call.arguments) for call in calls)), 0
    for call in calls:
        call.arguments = type(call.arguments).from_buffer(block, start)
        start += ctypes.sizeof(call.arguments)


def kernel_addresses(calls: Sequence[Call], folder: Path | None) -> list[int]:
    """Return the memory address of the compiled kernel of each call. Kernels that are not compiled yet are compiled
    together; a `folder` keeps their machine code for the next start of the program."""
    module, names = ir.Module(), dict[tuple[Any, ...], str]()
    for call in calls:
        if call.key not in KERNELS and call.key not in names:
            names[call.key] = f"kernel{len(names)}"
            add_kernel(module, names[call.key], type(call.arguments), call.emit)
    if names:
        MODULES.append(load(module, folder=folder))
        KERNELS.update({key: MODULES[-1].get_function_address(name) for key, name in names.items()})
    return [KERNELS[call.key] for call in calls]


@cache
def sequence() -> Callable[[int, int], None]:
    """Return the compiled function `(table, count)` that calls `count` kernels one after the other. `table` is the
    address of an array of addresses: kernel, arguments, kernel, arguments, and so on."""
    module = ir.Module()
    add_sequence(module)
    MODULES.append(load(module))
    prototype = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)  # holds the GIL during the call
    return prototype(MODULES[-1].get_function_address("sequence"))


def add_sequence(module: ir.Module) -> None:
    task = ir.FunctionType(ir.VoidType(), [BYTES])
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [BYTES, INT]), "sequence")
    code = Code(function.append_basic_block())
    with code.loop(0, code.mul(function.args[1], INT(2)), 2) as (index, _):
        kernel = code.inttoptr(code.scalar(function.args[0], "int64", index), task.as_pointer())
        code.call(kernel, [code.inttoptr(code.scalar(function.args[0], "int64", code.add(index, INT(1))), BYTES)])
    code.ret_void()
