"""The builder of kernel code: LLVM IR (intermediate representation) with loops, vectors, and the dtypes of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

LANES = 16  # numbers in a vector; LLVM splits vectors if a CPU's registers are smaller
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


class Code(ir.IRBuilder):
    """A builder of the LLVM code of CPU kernels, with loops, vectors of LANES fp32 numbers, and the dtypes of tensors.
    Its methods emit code and return the LLVM value of the result."""

    thread: Any = INT(0)  # index of the thread that runs the kernel, less than the number of threads

    @contextmanager
    def loop(
        self, start: Any, end: Any, step: int = 1, carried: Sequence[Any] = ()
    ) -> Iterator[tuple[ir.Value, list[Any]]]:
        """Emit `for index in range(start, end, step)`, as `with code.loop(0, n) as (index, values):`; the `with` body
        emits the loop's body.

        `values` is initialized with `carried`. Values that the body assigns to its elements are carried to the next
        iteration; after the loop, `values` has the results.
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
        """Emit code that reads LANES bytes at `pointer`, from byte `index` on, as a vector of int32 from 0 to 255."""
        source = self.bitcast(self.at(pointer, "int8", index), ir.VectorType(ir.IntType(8), LANES).as_pointer())
        return self.zext(self.load(source, align=1), INTS)

    def at(self, pointer: ir.Value, dtype: str, index: Any) -> ir.Value:
        """Emit code for a pointer to element `index` of a tensor of this dtype whose address is `pointer`."""
        kind = ELEMENTS[dtype].as_pointer()
        base = self.inttoptr(pointer, kind) if pointer.type == INT else self.bitcast(pointer, kind)
        return self.gep(base, [number(index)])

    def vector(self, pointer: ir.Value, dtype: str, index: Any, count: int, left: Any = None) -> ir.Value:
        """Emit code that reads `count` elements of a tensor from `index` on as a vector, in the tensor's dtype. With
        `left`, only the first `left` elements are read, and the others are zeros."""
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
        """Emit code that converts a vector of elements of a dtype to fp32."""
        count = numbers.type.count
        kind, bits = (ir.VectorType(t, count) for t in (FLOAT, ir.IntType(32)))
        if dtype == "bfloat16":
            return self.bitcast(self.shl(self.zext(numbers, bits), ir.Constant(bits, [16] * count)), kind)
        return self.sitofp(numbers, kind) if dtype == "int8" else numbers

    def floats(self, pointer: ir.Value, dtype: str, index: Any) -> ir.Value:
        """Emit code that reads LANES elements of a tensor from `index` on, as fp32."""
        return self.as_floats(self.vector(pointer, dtype, index, LANES), dtype)

    def scalar(self, pointer: ir.Value, dtype: str, index: Any) -> ir.Value:
        """Emit code that reads element `index` of a tensor as fp32; integers other than int8 are not converted."""
        value = self.load(self.at(pointer, dtype, index), align=1)
        if dtype == "bfloat16":
            return self.bitcast(self.shl(self.zext(value, ir.IntType(32)), ir.IntType(32)(16)), FLOAT)
        return self.sitofp(value, FLOAT) if dtype == "int8" else value

    def put(self, value: ir.Value, pointer: ir.Value, dtype: str, index: Any) -> None:
        """Emit code that writes an fp32 number, or a vector of them, to the elements of a tensor from `index` on; bf16
        is rounded half to even, and int8 needs integers from -128 to 127."""
        if dtype == "bfloat16":
            bits, short = self.bfloat16(value), ir.IntType(16)
            value = self.trunc(bits, ir.VectorType(short, bits.type.count) if value.type != FLOAT else short)
        elif dtype == "int8":
            byte = ELEMENTS[dtype]
            value = self.fptosi(value, ir.VectorType(byte, value.type.count) if value.type != FLOAT else byte)
        self.store(value, self.bitcast(self.at(pointer, dtype, index), value.type.as_pointer()), align=1)

    def bfloat16(self, value: ir.Value) -> ir.Value:
        """Emit code that converts an fp32 number, or a vector of them, to the bits of bf16, as int32; rounded half to
        even."""
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
        """Emit code that rounds an fp32 number, or a vector of LANES, to the values of a dtype; the result is fp32."""
        if dtype == "float32":
            return value
        shift = integers(16) if value.type == FLOATS else ir.IntType(32)(16)
        return self.bitcast(self.shl(self.bfloat16(value), shift), value.type)

    def prefetch(self, pointer: ir.Value) -> None:
        """Emit a prefetch of the cache line at `pointer` to the L2 cache."""
        kind = ir.IntType(32)
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), [self.bitcast(pointer, BYTES), kind(0), kind(2), kind(1)])

    def intrinsic(self, name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
        """Emit a call of the LLVM intrinsic with this full name and result type."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.call(self.module.globals.get(name) or ir.Function(self.module, kind, name), arguments)

    def repeat(self, value: ir.Value) -> ir.Value:
        """Emit code for a vector with LANES copies of an fp32 number."""
        empty = ir.Constant(FLOATS, ir.Undefined)
        first = self.insert_element(empty, value, ir.IntType(32)(0))
        return self.shuffle_vector(first, empty, integers(0))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Emit code for a * b + c, rounded once."""
        return self.call(self.declare("llvm.fma", a.type, [a.type] * 3), [a, b, c])

    def fmin(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit code for the smaller of two numbers, or NaN if `a` is NaN."""
        return self.select(self.fcmp_ordered("<", b, a), b, a)

    def least(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit code for the smaller of two integers."""
        return self.select(self.icmp_signed("<", a, b), a, b)

    def sum(self, vector: ir.Value) -> ir.Value:
        """Emit code that sums the numbers of a vector pairwise."""
        function = self.declare("llvm.vector.reduce.fadd", FLOAT, [FLOAT, FLOATS], FLOATS)
        return self.call(function, [FLOAT(0.0), vector], fastmath=["reassoc"])

    def declare(self, name: str, result: ir.Type, arguments: Sequence[ir.Type], kind: ir.Type | None = None) -> Any:
        """Declare the LLVM function `name`, such as an intrinsic for fp32 numbers or for vectors of LANES of them, with
        these result and argument types, and return it. `kind`, by default the result type, is the type suffix in the
        function's full name."""
        kind = kind or result
        name += f".v{LANES}f32" if kind == FLOATS else ".f32"
        return self.module.globals.get(name) or ir.Function(self.module, ir.FunctionType(result, arguments), name)


def number(value: Any) -> ir.Value:
    """Convert an int to an LLVM constant of 64 bits; LLVM values are returned unchanged."""
    return INT(value) if isinstance(value, int) else value


def integers(value: int) -> ir.Constant:
    """Return an LLVM constant: a vector with LANES copies of `value` as int32."""
    return ir.Constant(INTS, [value] * LANES)
