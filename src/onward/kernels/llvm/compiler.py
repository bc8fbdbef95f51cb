"""Compiles kernels to machine code of this CPU, and runs them in the threads of PyTorch.

A kernel is a Python function that emits LLVM's intermediate code through `Code`. LLVM compiles it in some 50 ms, when
it is first needed; no compiler is needed on the machine. The threads are those of PyTorch's OpenMP runtime: a second
pool of threads would compete for the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import llvmlite
import llvmlite.binding as llvm
import torch
from llvmlite import ir

from onward.kernels.llvm import kept
from onward.kernels.llvm.code import BYTES, INT, Code
from onward.kernels.memory import Kernel
from onward.kernels.requirements import OPENMP, openmp

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


class Arguments(ctypes.Structure):
    """The arguments of a kernel as a C structure, filled by callers in Python; the function `arguments` makes
    subclasses. Setting a field that does not exist raises an AttributeError."""

    __slots__ = ()
    names: ClassVar[tuple[str, ...]]  # names of the fields, in order


def arguments(name: str, *fields: str) -> type[Arguments]:
    """Make a subclass of Arguments called `name` with these fields, each an address or a 64-bit integer, followed by
    the numbers of `items` and `threads`. Callers set the fields by name, and emitters read them by name from
    `Values`."""
    names = *fields, "items", "threads"
    declared = [(field, ctypes.c_int64) for field in names]
    return type(name, (Arguments,), {"__slots__": (), "_fields_": declared, "names": names})


class Values(SimpleNamespace):
    """The arguments of a kernel while its code is emitted: LLVM values under the field names of its Arguments, without
    `threads`."""


Emit = Callable[[Code, Values, ir.Value, ir.Value], None]  # (code, given, first, end): see `add_kernel`


def add_kernel(module: ir.Module, name: str, structure: type[Arguments], emit: Emit) -> None:
    """Add the kernel `name` to an LLVM module: a loop over independent items, such as the rows of a weight, which
    threads divide among themselves.

    `emit(code, given, first, end)` emits the code for items `first` to `end` - 1; `given` are the arguments. The kernel
    takes the address of a `structure`.
    """
    void, int32, task = ir.VoidType(), ir.IntType(32), ir.FunctionType(ir.VoidType(), [BYTES])
    if OPENMP[0] not in module.globals:
        types = ir.FunctionType(void, [task.as_pointer(), BYTES, int32, int32]), *[ir.FunctionType(int32, [])] * 2
        for kind, function in zip(types, OPENMP):
            ir.Function(module, kind, function)
    parallel, thread_num, num_threads = (module.globals[function] for function in OPENMP)

    share = ir.Function(module, ir.FunctionType(void, [BYTES, INT, INT]), name + ".share")
    fields, thread, threads = share.args
    code = Code(share.append_basic_block())
    code.thread = thread
    given = Values(**{field: code.scalar(fields, "int64", i) for i, field in enumerate(structure.names[:-1])})
    first, end = (code.udiv(code.mul(given.items, t), threads) for t in (thread, code.add(thread, INT(1))))
    emit(code, given, first, end)
    code.ret_void()

    worker = ir.Function(module, task, name + ".worker")
    code = Code(worker.append_basic_block())
    code.call(share, [worker.args[0], *(code.zext(code.call(f, []), INT) for f in (thread_num, num_threads))])
    code.ret_void()

    kernel = ir.Function(module, task, name)
    code = Code(kernel.append_basic_block())
    threads = code.scalar(kernel.args[0], "int64", structure.names.index("threads"))
    with code.if_else(code.icmp_signed(">", threads, INT(1))) as (multithreaded, single_threaded):
        with multithreaded:
            code.call(parallel, [worker, kernel.args[0], code.trunc(threads, int32), int32(0)])
        with single_threaded:
            code.call(share, [kernel.args[0], INT(0), INT(1)])
    code.ret_void()


def load(module: ir.Module, cpu: str | None = None, folder: Path | None = None) -> Any:
    """Compile an LLVM module for a CPU (`cpu`: LLVM's name of it, by default this machine's); return the LLVM engine,
    whose `get_function_address` gives the address of each function. With a private `folder`, the machine code is stored
    there and loaded from there the next time."""
    for name in OPENMP:
        llvm.add_symbol(name, ctypes.cast(getattr(openmp(), name), ctypes.c_void_p).value)
    features, cpu = ("", cpu) if cpu else (host_features().flatten(), llvm.get_host_cpu_name())
    target = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3)
    module.triple = llvm.get_default_triple()
    text = str(module)
    if place := folder and kept.private_folder(folder):
        key = repr((text, cpu, features, llvmlite.__version__, llvm.llvm_version_info))
        path = place / f"{hashlib.sha256(key.encode()).hexdigest()}.o"
        code = kept.read(path)
        if code is None or not kept.is_loadable(code, [f.name for f in module.functions if f.blocks]):
            code = target.emit_object(optimized(text, target))
            kept.write(path, code)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    else:
        engine = llvm.create_mcjit_compiler(optimized(text, target), target)
    engine.finalize_object()
    return engine


def host_features() -> Any:
    features = llvm.get_host_cpu_features()
    # LLVM does not detect the bf16 instructions of ARM
    if platform.machine() in ("aarch64", "arm64") and torch.cpu.get_capabilities().get("bf16"):
        features["bf16"] = True
    return features


def optimized(text: str, target: Any) -> Any:
    """Parse the text of an LLVM module and optimize it for the CPU `target`; return the module. Raises a RuntimeError
    if the text is invalid, since LLVM would otherwise abort the process later."""
    parsed = llvm.parse_assembly(text)
    parsed.verify()
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    return parsed


def callable_kernel(structure: type[Arguments], emit: Emit, cpu: str | None = None) -> Kernel:
    module = ir.Module()
    add_kernel(module, "kernel", structure, emit)
    engine = load(module, cpu)
    prototype = ctypes.PYFUNCTYPE(None, ctypes.POINTER(structure))  # keeps the GIL
    return Kernel(prototype(engine.get_function_address("kernel")), structure, engine)
