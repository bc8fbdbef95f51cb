"""A decoding step as one program of machine code: the recorded operations, each a kernel on the memory it was recorded
with.

Between two kernels of a program there is no Python and no PyTorch, whose calls cost more than the arithmetic of a
single token. The weights are read where they are, so that a program sees every change of them in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from onward.model.kernels.memory import Unreadable, address, buffer, rows_address, strided_address
from onward.model.kernels.products import emit
from onward.model.linear import MIN_PARALLEL, max_rows
from onward.model.paged import PagedLayerCache
from onward.model.quantize import addresses as weight_addresses
from onward.model.recording import Attention, NotCompilable, Operation, Record, Recording, Write

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int64: "int64"}
FACTORIES = {"new_full", "new_zeros", "new_ones", "new_empty", "zeros_like", "ones_like", "empty_like", "full_like"}
MIN_PARALLEL_HEADS = 512  # numbers of a row's queries from which several threads are faster than one
aten = torch.ops.aten


@dataclass
class Call:
    """A call of a kernel: `key` names its code, `fields` are its arguments; the threads divide its items, if several
    are faster than one."""

    key: tuple[Any, ...]
    emit: Emit
    fields: list[int]
    items: int = 1
    parallel: bool = False
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
        with readable_or_refused():
            self.calls = [call for record in records for call in lower(record, cache, recording.positions)]
        addresses = kernel_addresses(self.calls, folder)
        self.fields = [(ctypes.c_int64 * (len(c.fields) + 2))(*c.fields, c.items, 1) for c in self.calls]
        table = [n for address, fields in zip(addresses, self.fields) for n in (address, ctypes.addressof(fields))]
        self.table = (ctypes.c_int64 * len(table))(*table)
        self.layers: Sequence[object] = []
        self.threads = 0  # as many as `scratch` is for
        self.paged = [is_paged(layer) for layer in cache.layers]

    def run(self, tokens: Tensor, positions: Tensor, cache: KVCache, length: int) -> Tensor:
        """The result for tokens (B, T) at positions (B, T), from which the kernels know what to read; the next run
        overwrites it. Raises NotCompilable for a cache of another form."""
        self.recording.tokens.copy_(tokens)
        self.recording.positions.copy_(positions)
        if self.uses_rope_length:
            self.recording.rope_length.copy_(cache.rope_length[: tokens.size(0)])
        if self.layers != cache.layers or self.threads != torch.get_num_threads():
            with readable_or_refused():
                self.bind(cache)
        sequence()(ctypes.addressof(self.table), len(self.calls))
        return self.recording.result

    def bind(self, cache: KVCache) -> None:
        """Use the memory of a cache, which is another one after it has grown, and as many threads as there are."""
        layers, threads, rows = list(cache.layers), torch.get_num_threads(), len(self.recording.tokens)
        if self.paged != [is_paged(layer) for layer in layers]:
            raise Unreadable("a cache of another kind")
        queries = [call.record.q for call in self.calls if isinstance(call.record, Attention)]
        heads = max((q.size(2) for q in queries), default=0)
        length = max(layer.slots * (layer.table.size(1) if is_paged(layer) else 1) for layer in layers)
        self.scratch = buffer((threads, heads, length), torch.float32)
        scratch = address(self.scratch, torch.float32, threads, heads, length)
        for call, fields in zip(self.calls, self.fields):
            record = call.record
            fields[len(call.fields) + 1] = threads if call.parallel else 1
            if not isinstance(record, Write | Attention):
                continue
            layer = layers[record.layer]
            table = rows_address(layer.table, torch.int64, rows, layer.table.size(1)) if is_paged(layer) else (0, 0)
            if isinstance(record, Write):
                entry = entry_address(layer, record.name, record.vectors.dtype, rows, record.vectors.shape[2:])
                fields[0], fields[4:7] = entry, [layer.slots, *table]
            else:
                names = record.key, record.value
                pairs = zip(names, record.shapes)
                fields[2:4] = [entry_address(layer, name, record.q.dtype, rows, shape) for name, shape in pairs]
                fields[8:14] = [layer.slots, layer.slots, scratch, length, *table]
        self.layers, self.threads = layers, threads


@contextmanager
def readable_or_refused() -> Iterator[None]:
    """NotCompilable in place of Unreadable."""
    try:
        yield
    except Unreadable as reason:
        raise NotCompilable(str(reason)) from reason


def entry_address(layer: LayerCache, name: str, dtype: torch.dtype, rows: int, shape: Sequence[int]) -> int:
    """The address of an entry of a layer: (B or more, S, *shape), contiguous, or (blocks, S, *shape). Raises
    Unreadable."""
    entry = layer.entries[name]
    if not is_paged(layer) and len(entry) < rows:
        raise Unreadable(f"a cache of {len(entry)} rows for a step of {rows}")
    return address(entry, dtype, len(entry), layer.slots, *shape)


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
    if isinstance(record, Write):
        width, dtype = record.vectors[0, 0].numel(), DTYPES[record.vectors.dtype]
        fields = [0, whole(record.vectors), whole(positions), positions.size(1), 0, 0, 0]
        paged = is_paged(kv_cache.layers[record.layer])
        emitted = attention.write(width, dtype, paged)
        return [Call(("write", width, dtype, paged), emitted, fields, positions.numel(), record=record)]
    if isinstance(record, Attention):
        rows, tokens, heads, d_head = record.q.shape
        (kv_heads, *key_widths), (value_heads, *value_widths) = record.shapes
        if key_widths != [d_head] or len(value_widths) != 1 or value_heads != kv_heads or heads % kv_heads:
            raise NotCompilable("attention to a cache of another form")
        shape = heads, kv_heads, d_head, value_widths[0], DTYPES[record.q.dtype]
        options = attention.Options(record.window, record.scale, record.softcap, record.sinks is not None)
        fields = [
            whole(record.y),
            whole(record.q),
            0,
            0,
            address(record.sinks, record.q.dtype, heads),
            whole(positions),
            rows * tokens,
            tokens,
            *[0] * 6,
        ]
        paged = is_paged(kv_cache.layers[record.layer])
        parallel = heads * d_head >= MIN_PARALLEL_HEADS
        emitted = attention.attend(*shape, options, paged)
        return [Call(("attend", *shape, options, paged), emitted, fields, rows * tokens * kv_heads, parallel, record)]
    return OPERATIONS.get(name_of(record).removesuffix("_"), unknown)(record)


def whole(tensor: Tensor) -> int:
    """The address of a contiguous tensor of the recording. Raises Unreadable."""
    return address(tensor, tensor.dtype, *tensor.shape)


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
    fields = [strided_address(t) for t in (out, *operands)]
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
        key = operation.function, *given, *operation.options.values()
        x = operation.arguments[0]
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
    if operation.options:
        raise NotCompilable("a product in another form")
    if rows > max_rows(x.dtype):
        raise NotCompilable(f"{rows} rows")
    dtype, pointer = DTYPES[x.dtype], address(weight, x.dtype, outputs, inputs)
    ends = address(bias, x.dtype, outputs), address(out, x.dtype, rows, outputs)
    fields = [address(x, x.dtype, rows, inputs), pointer, pointer, *ends, rows, outputs, inputs]
    emitted = emit(dtype, dtype, bias is not None)
    return [Call(("product", dtype, dtype, bias is not None), emitted, fields, outputs, weight.numel() >= MIN_PARALLEL)]


def quantized_product(operation: Operation) -> list[Call]:
    """A product with codes and scales."""
    (x, codes, scales, bias), out = operation.arguments, operation.result
    rows, outputs, inputs = x.numel() // x.size(-1), len(codes), x.size(-1)
    form, dtype = "int8" if codes.dtype == torch.int8 else "int4", DTYPES[x.dtype]
    ends = address(bias, x.dtype, outputs), address(out, x.dtype, *x.shape[:-1], outputs)
    fields = [whole(x), *weight_addresses(codes, scales, inputs), *ends, rows, outputs, inputs]
    emitted = emit(form, dtype, bias is not None)
    several = outputs * inputs >= MIN_PARALLEL
    return [Call(("product", form, dtype, bias is not None), emitted, fields, outputs, several)]


def average(operation: Operation) -> list[Call]:
    x, dims, *_ = operation.arguments
    if [d % x.dim() for d in dims] != [x.dim() - 1] or operation.result.dtype != torch.float32:
        raise NotCompilable("a mean over other dimensions than the last")
    fields, rows = [whole(operation.result), whole(x)], x.numel() // x.size(-1)
    return [Call(("mean", x.size(-1), x.dtype), elementwise.mean(Layout.of(x)), fields, rows)]


def layer_norm(operation: Operation) -> list[Call]:
    x, shape, weight, bias, eps = operation.arguments
    out, width = operation.result[0], x.size(-1)
    if len(shape) != 1:
        raise NotCompilable("a layer norm over several dimensions")
    emitted = elementwise.layer_norm(Layout.of(x), eps, weight is not None, bias is not None)
    key = "layer_norm", width, x.dtype, eps, weight is None, bias is None
    fields = [address(out, x.dtype, *x.shape), whole(x), *(address(t, x.dtype, width) for t in (weight, bias))]
    return [Call(key, emitted, fields, x.numel() // width)]


def embedding(operation: Operation) -> list[Call]:
    weight, ids = operation.arguments[:2]
    if ids.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise NotCompilable("an embedding in another form")
    fields = [*(whole(t) for t in (operation.result, weight, ids)), len(weight)]
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
