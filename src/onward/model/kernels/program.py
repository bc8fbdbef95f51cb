"""A decoding step as one program of machine code: the recorded operations, each a kernel on the memory it was recorded
with.

Between two kernels of a program there is no Python and no PyTorch, whose calls cost more than the arithmetic of a
single token. The weights are read where they are, so that a program sees every change of them in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from llvmlite import ir
from torch import Tensor

from onward.model.cache import KVCache, LayerCache
from onward.model.kernels import attention, elementwise
from onward.model.kernels.compiler import BYTES, INT, Code, Emit, add_kernel, load
from onward.model.kernels.elementwise import Formula, Layout, clamp, like, merged
from onward.model.kernels.products import emit
from onward.model.linear import MIN_PARALLEL, max_rows
from onward.model.paged import PagedLayerCache
from onward.model.recording import Attention, NotCompilable, Operation, Record, Recording, Write

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int64: "int64"}
FACTORIES = {"new_full", "new_zeros", "new_ones", "new_empty", "zeros_like", "ones_like", "empty_like", "full_like"}
MIN_PARALLEL_HEADS = 512  # numbers of a row's queries from which several threads are faster than one
aten = torch.ops.aten


@dataclass
class Call:
    """A call of a kernel: `key` names its code, `fields` are its arguments, the number of items and of threads."""

    key: tuple[Any, ...]
    emit: Emit
    fields: list[int]
    items: int = 1
    threads: int = 1
    record: Record | None = None  # of the cache, whose memory may move


class Program:
    """A step of some rows of a cache, from its recording. The caller has it to itself, since it has memory of its own.

    `weights` are the tensors that may change between runs, in place; `folder` keeps machine code for the next start.
    """

    def __init__(
        self, recording: Recording, cache: KVCache, weights: Sequence[Tensor], folder: Path | None = None
    ) -> None:
        self.recording = recording
        variable = [recording.tokens, recording.positions, recording.rope_length, *weights]
        records = needed(recording.records, variable, recording.result)
        self.uses_rope_length = any(memory(recording.rope_length) & reads_and_writes(record)[0] for record in records)
        self.calls = [call for record in records for call in lower(record, cache, recording.positions)]
        addresses = kernel_addresses(self.calls, folder)
        self.fields = [(ctypes.c_int64 * (len(c.fields) + 2))(*c.fields, c.items, c.threads) for c in self.calls]
        table = [n for address, fields in zip(addresses, self.fields) for n in (address, ctypes.addressof(fields))]
        self.table = (ctypes.c_int64 * len(table))(*table)
        self.layers: Sequence[object] = []

    def run(self, tokens: Tensor, positions: Tensor, cache: KVCache, length: int) -> Tensor:
        """The result for tokens (B, T) at positions (B, T), from which the kernels know what to read; the next run
        overwrites it."""
        self.recording.tokens.copy_(tokens)
        self.recording.positions.copy_(positions)
        if self.uses_rope_length:
            self.recording.rope_length.copy_(cache.rope_length[: tokens.size(0)])
        if self.layers != cache.layers:
            self.bind(cache)
        sequence()(ctypes.addressof(self.table), len(self.calls))
        return self.recording.result

    def bind(self, cache: KVCache) -> None:
        """Use the memory of a cache, which is another one after it has grown."""
        self.layers = list(cache.layers)
        queries = [call.record.q for call in self.calls if isinstance(call.record, Attention)]
        heads = max((q.size(2) for q in queries), default=0)
        length = max(layer.slots * (layer.table.size(1) if is_paged(layer) else 1) for layer in cache.layers)
        self.scratch = torch.empty(torch.get_num_threads() * heads * length)
        for call, fields in zip(self.calls, self.fields):
            record = call.record
            if not isinstance(record, Write | Attention):
                continue
            layer = cache.layers[record.layer]
            table = (layer.table.data_ptr(), layer.table.size(1)) if is_paged(layer) else (0, 0)
            if isinstance(record, Write):
                entry = layer.entries[record.name]
                fields[0], fields[4:7] = entry.data_ptr(), [entry.size(1), *table]
            else:
                key, value = layer.entries[record.key], layer.entries[record.value]
                fields[2:4] = [key.data_ptr(), value.data_ptr()]
                fields[8:14] = [key.size(1), key.size(1), self.scratch.data_ptr(), length, *table]


def is_paged(layer: LayerCache) -> TypeGuard[PagedLayerCache]:
    return isinstance(layer, PagedLayerCache)


KERNELS: dict[tuple[Any, ...], int] = {}  # the addresses of compiled kernels
MODULES: list[Any] = []  # their code


def kernel_addresses(calls: Sequence[Call], folder: Path | None) -> list[int]:
    """The address of each call's kernel; those that were not compiled before are, together."""
    module, names = ir.Module(), dict[tuple[Any, ...], str]()
    for call in calls:
        if call.key not in KERNELS and call.key not in names:
            names[call.key] = f"kernel{len(names)}"
            add_kernel(module, names[call.key], len(call.fields), call.emit)
    if names:
        MODULES.append(load(module, folder=folder))
        KERNELS.update({key: MODULES[-1].get_function_address(name) for key, name in names.items()})
    return [KERNELS[call.key] for call in calls]


@cache
def sequence() -> Callable[[int, int], None]:
    """The function that runs a table of kernels."""
    module = ir.Module()
    add_sequence(module)
    MODULES.append(load(module))
    prototype = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)  # keeps the lock of Python
    return prototype(MODULES[-1].get_function_address("sequence"))


def add_sequence(module: ir.Module) -> None:
    """Add the function `sequence(table, count)`, which calls kernels one after the other; the table has the address of
    each and that of its fields."""
    task = ir.FunctionType(ir.VoidType(), [BYTES])
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [BYTES, INT]), "sequence")
    code = Code(function.append_basic_block())
    with code.loop(0, code.mul(function.args[1], INT(2)), 2) as (index, _):
        kernel = code.inttoptr(code.scalar(function.args[0], "int64", index), task.as_pointer())
        code.call(kernel, [code.inttoptr(code.scalar(function.args[0], "int64", code.add(index, INT(1))), BYTES)])
    code.ret_void()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


def memory(value: Any) -> set[int]:
    """The memory of the tensors among arguments or results."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)}


def reads_and_writes(record: Record) -> tuple[set[int], set[int]]:
    """The memory that a record reads and writes; a view writes none."""
    if isinstance(record, Write):
        return memory(record.vectors), set()
    if isinstance(record, Attention):
        return memory([record.q, record.sinks]), memory(record.y)
    reads, result = memory([record.arguments, record.options]), memory(record.result)
    if record.function._schema.is_mutable:
        return reads, memory(record.arguments[0])
    return (set() if name_of(record) in FACTORIES else reads), result - reads


def name_of(operation: Operation) -> str:
    """The name of an operation without its overload."""
    return str(operation.function.overloadpacket.__name__)


def needed(records: Sequence[Record], variable: Sequence[Tensor], result: Tensor) -> list[Record]:
    """The records that change from step to step, and on which the result or the cache depends."""
    changing, constant = memory(list(variable)), set[int]()
    kept = []
    for record in records:
        reads, writes = reads_and_writes(record)
        if isinstance(record, Write | Attention) or reads & changing:
            if isinstance(record, Operation) and writes & constant:
                raise NotCompilable(f"{label(record)} in place of a constant")
            changing |= writes
            kept.append((record, reads, writes))
        else:
            constant |= writes
    live, found = memory(result), list[Record]()
    for record, reads, writes in reversed(kept):
        if isinstance(record, Write) or writes & live:
            live |= reads
            found.append(record)
    return found[::-1]


def label(record: Record) -> str:
    """What a record does, for messages."""
    return name_of(record) if isinstance(record, Operation) else type(record).__name__.lower()


def lower(record: Record, kv_cache: KVCache, positions: Tensor) -> list[Call]:
    """The calls of kernels for a record."""
    for tensor in tensors_in(vars(record).get("result")):
        if tensor.dtype not in DTYPES:
            raise NotCompilable(f"{label(record)} in {str(tensor.dtype).removeprefix('torch.')}")
    threads = torch.get_num_threads()
    if isinstance(record, Write):
        width, dtype = record.vectors[0, 0].numel(), DTYPES[record.vectors.dtype]
        fields = [0, record.vectors.data_ptr(), positions.data_ptr(), positions.size(1), 0, 0, 0]
        paged = is_paged(kv_cache.layers[record.layer])
        emitted = attention.write(width, dtype, paged)
        return [Call(("write", width, dtype, paged), emitted, fields, positions.numel(), record=record)]
    if isinstance(record, Attention):
        rows, tokens, heads, d_head = record.q.shape
        key = kv_cache.layers[record.layer].entries[record.key]
        if key.dtype != record.q.dtype or key.dim() != 4:
            raise NotCompilable("attention to a cache of another form")
        shape = heads, key.size(2), d_head, record.y.size(-1), DTYPES[record.q.dtype]
        options = attention.Options(record.window, record.scale, record.softcap, record.sinks is not None)
        fields = [
            address(record.y),
            address(record.q),
            0,
            0,
            address(record.sinks),
            address(positions),
            rows * tokens,
            tokens,
            *[0] * 6,
        ]
        paged = is_paged(kv_cache.layers[record.layer])
        parallel = threads if heads * d_head >= MIN_PARALLEL_HEADS else 1
        emitted = attention.attend(*shape, options, paged)
        return [
            Call(("attend", *shape, options, paged), emitted, fields, rows * tokens * key.size(2), parallel, record)
        ]
    return OPERATIONS.get(name_of(record).removesuffix("_"), unknown)(record)


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def unknown(operation: Operation) -> list[Call]:
    raise NotCompilable(name_of(operation))


def target_of(operation: Operation) -> Tensor:
    """The tensor that an operation writes."""
    result = operation.arguments[0] if operation.function._schema.is_mutable else operation.result
    return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]


def each(key: tuple[Any, ...], formula: Formula, out: Tensor, operands: Sequence[Tensor]) -> Call:
    """The call of an elementwise kernel."""
    if any(t.dtype not in DTYPES for t in operands):
        raise NotCompilable(f"{key[0]} of {operands[0].dtype}")
    layouts = merged([Layout.of(out), *(Layout.of(t, out.shape) for t in operands)])
    fields = [out.data_ptr(), *(t.data_ptr() for t in operands)]
    form = tuple((layout.shape[1:], layout.strides, layout.dtype) for layout in layouts)
    return Call((*key, form), elementwise.elementwise(formula, layouts), fields, layouts[0].shape[0])


def binary(of_floats: str, of_integers: str | None) -> Callable[[Operation], list[Call]]:
    """An operation of two operands, of which one may be a number; Code's methods for floats and for integers."""

    def lowered(operation: Operation) -> list[Call]:
        pair, out = operation.arguments[:2], target_of(operation)
        operands = [x for x in pair if isinstance(x, Tensor)]
        integral = out.dtype == torch.int64
        if operation.options.get("alpha", 1) != 1 or operation.options.get("rounding_mode"):
            raise NotCompilable(name_of(operation))
        if any((x.dtype == torch.int64) != integral for x in operands) or (integral and of_integers is None):
            raise NotCompilable(f"{name_of(operation)} of integers")
        if name_of(operation) == "rsub":
            pair = pair[1], pair[0]
        order = [i for i, x in enumerate(pair) if isinstance(x, Tensor)]

        def formula(code: Code, *values: Any) -> Any:
            by_place = dict(zip(order if name_of(operation) != "rsub" or len(order) < 2 else order[::-1], values))
            both = [by_place.get(i, like(code, values[0], pair[i]) if i not in by_place else None) for i in range(2)]
            return getattr(code, of_integers if integral and of_integers else of_floats)(*both)

        key = operation.function, *(x for x in pair if not isinstance(x, Tensor)), *order
        return [each(key, formula, out, operands)]

    return lowered


def unary(formula: Callable[..., Any], *defaults: Any) -> Callable[[Operation], list[Call]]:
    """An operation of one operand, with numbers as further arguments of its formula."""

    def lowered(operation: Operation) -> list[Call]:
        given = [*operation.arguments[1:], *defaults[len(operation.arguments) - 1 :]]
        x = operation.arguments[0]
        if not isinstance(x, Tensor) or any(isinstance(number, Tensor) for number in given):
            raise NotCompilable(f"{name_of(operation)} with a tensor as its parameter")
        key = operation.function, *given, *operation.options.values()
        return [each(key, lambda code, value: formula(code, value, *given), target_of(operation), [x])]

    return lowered


def power(code: Code, x: Any, exponent: float) -> Any:
    if exponent != 2:
        raise NotCompilable(f"a power of {exponent}")
    return code.fmul(x, x)


def convert(operation: Operation) -> list[Call]:
    """A copy, in another dtype or layout."""
    out = target_of(operation)
    source = operation.arguments[1] if name_of(operation) == "copy_" else operation.arguments[0]
    if out.dtype == torch.int64 and source.dtype != torch.int64:
        raise NotCompilable("a conversion to integers")
    to_float = source.dtype == torch.int64 != out.dtype
    formula = (lambda code, x: code.sitofp(x, elementwise.FLOAT)) if to_float else (lambda code, x: x)
    return [each(("copy", to_float), formula, out, [source])]


def joined(operation: Operation) -> list[Call]:
    """cat and stack: a copy of each part."""
    parts, dim = operation.arguments[0], operation.arguments[1] if len(operation.arguments) > 1 else 0
    if name_of(operation) == "stack":
        targets = operation.result.unbind(dim)
    else:
        targets = operation.result.split([part.size(dim) for part in parts], dim)
    return [each(("copy", False), lambda code, x: x, out, [part]) for out, part in zip(targets, parts) if part.numel()]


def product(operation: Operation) -> list[Call]:
    """mm and addmm with a weight."""
    bias = operation.arguments[0] if name_of(operation) == "addmm" else None
    x, transposed = operation.arguments[-2:]
    weight, out = transposed.t(), operation.result
    rows, (outputs, inputs) = len(x), weight.shape
    if not (weight.is_contiguous() and x.is_contiguous()) or operation.options:
        raise NotCompilable("a product in another form")
    if rows > max_rows(x.dtype):
        raise NotCompilable(f"{rows} rows")
    dtype = DTYPES[x.dtype]
    fields = [address(t) for t in (x, weight, weight, bias, out)] + [rows, outputs, inputs]
    threads = torch.get_num_threads() if weight.numel() >= MIN_PARALLEL else 1
    emitted = emit(dtype, dtype, bias is not None)
    return [Call(("product", dtype, dtype, bias is not None), emitted, fields, outputs, threads)]


def quantized_product(operation: Operation) -> list[Call]:
    """A product with codes and scales."""
    x, codes, scales, bias = operation.arguments
    rows, outputs, inputs = x.numel() // x.size(-1), len(codes), x.size(-1)
    if not x.is_contiguous():
        raise NotCompilable("a product in another form")
    form, dtype = "int8" if codes.dtype == torch.int8 else "int4", DTYPES[x.dtype]
    fields = [address(t) for t in (x, codes, scales, bias, operation.result)] + [rows, outputs, inputs]
    threads = torch.get_num_threads() if outputs * inputs >= MIN_PARALLEL else 1
    emitted = emit(form, dtype, bias is not None)
    return [Call(("product", form, dtype, bias is not None), emitted, fields, outputs, threads)]


def average(operation: Operation) -> list[Call]:
    x, *dims = operation.arguments[:2]
    last = dims and dims[0] and [d % x.dim() for d in dims[0]] == [x.dim() - 1]
    if not last or not x.is_contiguous() or operation.result.dtype != torch.float32:
        raise NotCompilable("a mean over other dimensions than the last")
    fields, rows = [operation.result.data_ptr(), x.data_ptr()], x.numel() // x.size(-1)
    return [Call(("mean", x.size(-1), x.dtype), elementwise.mean(Layout.of(x)), fields, rows)]


def layer_norm(operation: Operation) -> list[Call]:
    x, shape, weight, bias, eps = operation.arguments
    out = operation.result[0]
    if len(shape) != 1 or not x.is_contiguous() or any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        raise NotCompilable("a layer norm over several dimensions or dtypes")
    emitted = elementwise.layer_norm(Layout.of(x), eps, weight is not None, bias is not None)
    key = "layer_norm", x.size(-1), x.dtype, eps, weight is None, bias is None
    return [Call(key, emitted, [address(t) for t in (out, x, weight, bias)], x.numel() // x.size(-1))]


def embedding(operation: Operation) -> list[Call]:
    weight, ids = operation.arguments[:2]
    if not (weight.is_contiguous() and ids.is_contiguous()) or weight.dtype not in DTYPES:
        raise NotCompilable("an embedding in another form")
    fields = [address(t) for t in (operation.result, weight, ids)]
    emitted = elementwise.gather(Layout.of(weight), DTYPES[ids.dtype])
    return [Call(("embedding", weight.size(-1), weight.dtype), emitted, fields, ids.numel())]


def gelu(operation: Operation) -> list[Call]:
    approximate = operation.options.get("approximate", "none") == "tanh"
    return unary(elementwise.gelu_tanh if approximate else elementwise.gelu)(operation)


OPERATIONS: dict[str, Callable[[Operation], list[Call]]] = {
    "add": binary("fadd", "add"),
    "sub": binary("fsub", "sub"),
    "rsub": binary("fsub", "sub"),
    "mul": binary("fmul", "mul"),
    "div": binary("fdiv", None),
    "pow": unary(power),
    "neg": unary(lambda code, x: code.fneg(x)),
    "rsqrt": unary(lambda code, x: code.fdiv(like(code, x, 1.0), elementwise.root(code, x))),
    "relu": unary(lambda code, x: clamp(code, x, 0.0, None)),
    "clamp": unary(clamp, None, None),
    "hardtanh": unary(clamp, -1.0, 1.0),
    "sigmoid": unary(elementwise.sigmoid),
    "silu": unary(lambda code, x: code.fmul(x, elementwise.sigmoid(code, x))),
    "tanh": unary(elementwise.tanh),
    "gelu": gelu,
    "cos": unary(lambda code, x: elementwise.by_element(code, "cosf", x)),
    "sin": unary(lambda code, x: elementwise.by_element(code, "sinf", x)),
    "_to_copy": convert,
    "clone": convert,
    "copy": convert,
    "cat": joined,
    "stack": joined,
    "mm": product,
    "addmm": product,
    "quantized_linear": quantized_product,
    "mean": average,
    "native_layer_norm": layer_norm,
    "embedding": embedding,
}
