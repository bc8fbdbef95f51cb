"""Compiles loops over vectors to machine code of this CPU, and runs them in the threads of PyTorch.

A kernel is a Python function that emits LLVM's intermediate code through `Code`. LLVM compiles it in some 50 ms, when
it is first called; no compiler is needed on the machine. The threads are those of PyTorch's OpenMP runtime: a second
pool of threads beside it would compete for the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from onward.kernels.available import OPENMP, openmp
from onward.kernels.llvm import kept

LANES = 16  # numbers of a vector; LLVM splits it where the registers of a CPU are smaller
BYTES = ir.IntType(8).as_pointer()
INT = ir.IntType(64)
FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
ELEMENTS = {
    "float32": FLOAT,
    "bfloat16": ir.IntType(16),
    "int8": ir.IntType(8),
    "int32": ir.IntType(32),
    "int64": INT,
}

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


class Code(ir.IRBuilder):
    """A builder of LLVM code with loops, vectors of LANES fp32 numbers, and the dtypes of tensors."""

    thread: Any = INT(0)  # the index of the thread that runs a kernel, below their number

    @contextmanager
    def loop(
        self, start: Any, end: Any, step: int = 1, carried: Sequence[Any] = ()
    ) -> Iterator[tuple[ir.Value, list[Any]]]:
        """`for index in range(start, end, step)`, as `with code.loop(0, n) as (index, values):`.

        `values` begins as `carried`. What the body puts into it is there in the next turn, and after the loop.
        """
        before, head = self.block, self.append_basic_block("head")
        body, after = self.append_basic_block("body"), self.append_basic_block("after")
        self.branch(head)
        self.position_at_end(head)
        index, phis = self.phi(INT), [self.phi(value.type) for value in carried]
        index.add_incoming(number(start), before)
        for phi, value in zip(phis, carried):
            phi.add_incoming(value, before)
        self.cbranch(self.icmp_signed("<", index, number(end)), body, after)
        self.position_at_end(body)
        values: list[Any] = list(phis)
        yield index, values
        index.add_incoming(self.add(index, number(step)), self.block)
        for phi, value in zip(phis, values):
            phi.add_incoming(value, self.block)
        self.branch(head)
        self.position_at_end(after)
        values[:] = phis

    def bytes(self, pointer: ir.Value, index: Any) -> ir.Value:
        """LANES bytes from `index` on, as int32 from 0 to 255."""
        source = self.bitcast(self.at(pointer, "int8", index), ir.VectorType(ir.IntType(8), LANES).as_pointer())
        return self.zext(self.load(source, align=1), INTS)

    def at(self, pointer: ir.Value, dtype: str, index: Any) -> ir.Value:
        """A pointer to element `index` of a tensor of this dtype, given its address."""
        kind = ELEMENTS[dtype].as_pointer()
        base = self.inttoptr(pointer, kind) if pointer.type == INT else self.bitcast(pointer, kind)
        return self.gep(base, [number(index)])

    def vector(self, pointer: ir.Value, dtype: str, index: Any, count: int, left: Any = None) -> ir.Value:
        """`count` elements from `index` on, as they are; those from `left` on are not read, and zeros."""
        kind = ir.VectorType(ELEMENTS[dtype], count)
        source = self.bitcast(self.at(pointer, dtype, index), kind.as_pointer())
        if left is None:
            return self.load(source, align=1)
        longs = ir.VectorType(INT, count)
        first = self.insert_element(ir.Constant(longs, ir.Undefined), left, ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count)
        limit = self.shuffle_vector(first, ir.Constant(longs, ir.Undefined), lanes)
        mask = self.icmp_unsigned("<", ir.Constant(longs, list(range(count))), limit)
        name = f"llvm.masked.load.v{count}{ELEMENTS[dtype].intrinsic_name}.p0"
        return self.intrinsic(name, kind, [source, ir.IntType(32)(1), mask, ir.Constant(kind, None)])

    def as_floats(self, numbers: ir.Value, dtype: str) -> ir.Value:
        """A vector of elements of a dtype as fp32."""
        count = numbers.type.count
        kind, bits = (ir.VectorType(t, count) for t in (FLOAT, ir.IntType(32)))
        if dtype == "bfloat16":
            return self.bitcast(self.shl(self.zext(numbers, bits), ir.Constant(bits, [16] * count)), kind)
        return self.sitofp(numbers, kind) if dtype == "int8" else numbers

    def floats(self, pointer: ir.Value, dtype: str, index: Any) -> ir.Value:
        """LANES elements from `index` on, as fp32."""
        return self.as_floats(self.vector(pointer, dtype, index, LANES), dtype)

    def scalar(self, pointer: ir.Value, dtype: str, index: Any) -> ir.Value:
        """One element as fp32, or as int64."""
        value = self.load(self.at(pointer, dtype, index), align=1)
        if dtype == "bfloat16":
            return self.bitcast(self.shl(self.zext(value, ir.IntType(32)), ir.IntType(32)(16)), FLOAT)
        return self.sitofp(value, FLOAT) if dtype == "int8" else value

    def put(self, value: ir.Value, pointer: ir.Value, dtype: str, index: Any) -> None:
        """Write an fp32 number, or a vector of them, from element `index` on; rounded to bf16 half to even."""
        if dtype == "bfloat16":
            bits, short = self.bfloat16(value), ir.IntType(16)
            value = self.trunc(bits, ir.VectorType(short, bits.type.count) if value.type != FLOAT else short)
        self.store(value, self.bitcast(self.at(pointer, dtype, index), value.type.as_pointer()), align=1)

    def bfloat16(self, value: ir.Value) -> ir.Value:
        """The bits of an fp32 number, or of a vector of them, in bf16, as int32; rounded half to even."""
        count, word = getattr(value.type, "count", 0), ir.IntType(32)
        kind = ir.VectorType(word, count) if count else word

        def constant(number: int) -> ir.Constant:
            return ir.Constant(kind, [number] * count if count else number)

        bits = self.bitcast(value, kind)
        odd = self.and_(self.lshr(bits, constant(16)), constant(1))
        rounded = self.add(self.add(bits, constant(0x7FFF)), odd)
        rounded = self.select(self.fcmp_unordered("uno", value, value), self.or_(bits, constant(0x400000)), rounded)
        return self.lshr(rounded, constant(16))

    def rounded(self, value: ir.Value, dtype: str) -> ir.Value:
        """A vector of LANES fp32 numbers, or one, rounded to a dtype."""
        if dtype == "float32":
            return value
        shift = integers(16) if value.type == FLOATS else ir.IntType(32)(16)
        return self.bitcast(self.shl(self.bfloat16(value), shift), value.type)

    def prefetch(self, pointer: ir.Value) -> None:
        """Move a line of memory to the second level of cache."""
        kind = ir.IntType(32)
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), [self.bitcast(pointer, BYTES), kind(0), kind(2), kind(1)])

    def intrinsic(self, name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
        """Call a function of LLVM by its full name."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.call(self.module.globals.get(name) or ir.Function(self.module, kind, name), arguments)

    def repeat(self, value: ir.Value) -> ir.Value:
        """A vector of LANES times an fp32 number."""
        empty = ir.Constant(FLOATS, ir.Undefined)
        first = self.insert_element(empty, value, ir.IntType(32)(0))
        return self.shuffle_vector(first, empty, integers(0))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c, rounded once."""
        return self.call(self.declare("llvm.fma", a.type, [a.type] * 3), [a, b, c])

    def sum(self, vector: ir.Value) -> ir.Value:
        """The sum of a vector's numbers, in pairs."""
        function = self.declare("llvm.vector.reduce.fadd", FLOAT, [FLOAT, FLOATS], FLOATS)
        return self.call(function, [FLOAT(0.0), vector], fastmath=["reassoc"])

    def declare(self, name: str, result: ir.Type, arguments: Sequence[ir.Type], kind: ir.Type | None = None) -> Any:
        """A function of LLVM for a type: that of its result, or `kind`."""
        kind = kind or result
        name += f".v{LANES}f32" if kind == FLOATS else ".f32"
        return self.module.globals.get(name) or ir.Function(self.module, ir.FunctionType(result, arguments), name)


def number(value: Any) -> ir.Value:
    """An int as a constant; values of the code as they are."""
    return INT(value) if isinstance(value, int) else value


def integers(value: int) -> ir.Constant:
    """A constant vector of LANES times the same int32."""
    return ir.Constant(INTS, [value] * LANES)


class Arguments(ctypes.Structure):
    """The arguments of a kernel; `arguments` makes subclasses. A misspelled name is an AttributeError."""

    __slots__ = ()
    names: ClassVar[tuple[str, ...]]  # of the fields, in their order


def arguments(name: str, *fields: str) -> type[Arguments]:
    """A class of Arguments with these fields, each an address or a number of 64 bits, followed by the number of `items`
    and of `threads`. Callers set the fields by name, and emitters read them by name from `Values`."""
    names = *fields, "items", "threads"
    declared = [(field, ctypes.c_int64) for field in names]
    return type(name, (Arguments,), {"__slots__": (), "_fields_": declared, "names": names})


class Values(SimpleNamespace):
    """The arguments of a kernel in its code: LLVM values under the names of its Arguments, without `threads`."""


Emit = Callable[[Code, Values, ir.Value, ir.Value], None]  # (code, given, first, end): see `add_kernel`


def add_kernel(module: ir.Module, name: str, structure: type[Arguments], emit: Emit) -> None:
    """Add a loop over independent items, such as the rows of a weight, which threads divide among themselves.

    `emit(code, given, first, end)` emits the code for items `first` to `end` - 1. The function `name` takes the address
    of a `structure`.
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
    with code.if_else(code.icmp_signed(">", threads, INT(1))) as (several, one):
        with several:
            code.call(parallel, [worker, kernel.args[0], code.trunc(threads, int32), int32(0)])
        with one:
            code.call(share, [kernel.args[0], INT(0), INT(1)])
    code.ret_void()


def load(module: ir.Module, cpu: str | None = None, folder: Path | None = None) -> Any:
    """Compile a module for a CPU (LLVM's name of it, by default this one): its functions' addresses by
    `get_function_address`. The machine code is kept in a folder, if one is given, and taken from there."""
    for name in OPENMP:
        llvm.add_symbol(name, ctypes.cast(getattr(openmp(), name), ctypes.c_void_p).value)
    features, cpu = ("", cpu) if cpu else (llvm.get_host_cpu_features().flatten(), llvm.get_host_cpu_name())
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


def optimized(text: str, target: Any) -> Any:
    """A module of LLVM from its text, optimized. A RuntimeError if it is invalid: LLVM would end the process later."""
    parsed = llvm.parse_assembly(text)
    parsed.verify()
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    return parsed


def callable_kernel(structure: type[Arguments], emit: Emit, cpu: str | None = None) -> Callable[..., None]:
    """A kernel as a function of the fields of its structure, in their order or by name."""
    module = ir.Module()
    add_kernel(module, "kernel", structure, emit)
    engine = load(module, cpu)
    prototype = ctypes.PYFUNCTYPE(None, ctypes.POINTER(structure))  # keeps the lock of Python
    function = prototype(engine.get_function_address("kernel"))

    def call(*fields: int, **named: int) -> None:
        function(structure(*fields, **named))

    call.engine = engine  # type: ignore[attr-defined]  # the code lives as long as this
    return call
