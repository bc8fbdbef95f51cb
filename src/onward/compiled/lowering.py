"""Lowering: translate the recorded operations of a step to calls of kernels, whose arguments are checked addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.compiled.interface import NotCompilable, TooManyRows
from onward.compiled.needed import label, name_of, tensors_in
from onward.compiled.recording import Attention, Operation, Record, Write
from onward.kernels.linear import max_rows
from onward.kernels.llvm import attention, elementwise
from onward.kernels.llvm.code import Code
from onward.kernels.llvm.compiler import Arguments, Emit
from onward.kernels.llvm.elementwise import Formula, Layout, clamp, like, merged
from onward.kernels.llvm.products import ProductArguments, emit
from onward.kernels.memory import Unreadable, address, strided_address
from onward.kernels.quantized import addresses as weight_addresses
from onward.kernels.rules import MIN_PARALLEL
from onward.model.cache import KVCache

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int64: "int64"}
MIN_PARALLEL_HEADS = 512  # numbers of a row's queries from which several threads are faster than one


@dataclass
class Call:
    """One call of a kernel in a compiled step: which kernel, and its arguments. `Binding` sets the number of threads
    and the arguments that depend on a cache."""

    key: tuple[Any, ...]  # equal for calls of the same kernel
    emit: Emit
    arguments: Arguments
    parallel: bool = False  # whether several threads are faster than one
    record: Write | Attention | None = None  # access to the cache, whose memory may move


@contextmanager
def unreadable_is_not_compilable() -> Iterator[None]:
    """Convert an Unreadable (a tensor that kernels cannot read) raised inside the `with` block to NotCompilable."""
    try:
        yield
    except Unreadable as reason:
        raise NotCompilable(str(reason)) from reason


def lower(records: Sequence[Record], cache: KVCache, positions: Tensor) -> list[Call]:
    """Translate the records of a decoding step (operations, cache writes and attention) to calls of kernels. `cache`
    has the kinds of layers that the kernels read; `positions` (B, T) is the tensor of positions in the recording.
    Raises NotCompilable for an operation or tensor without a kernel."""
    calls = []
    with unreadable_is_not_compilable():
        for record in records:
            if isinstance(record, Write):
                calls.append(write(record, cache.layers[record.layer].table is not None, positions))
            elif isinstance(record, Attention):
                calls.append(attend(record, cache.layers[record.layer].table is not None, positions))
            else:
                calls += operation_calls(record)
    return calls


def write(record: Write, paged: bool, positions: Tensor) -> Call:
    """Return the kernel call that writes the vectors of `record` to a contiguous or a `paged` cache, at `positions`
    (B, T)."""
    width, dtype = record.vectors[0, 0].numel(), DTYPES[record.vectors.dtype]
    arguments = attention.WriteArguments(
        vectors=contiguous_address(record.vectors),
        positions=contiguous_address(positions),
        tokens=positions.size(1),
        items=positions.numel(),
    )
    return Call(("write", width, dtype, paged), attention.write(width, dtype, paged), arguments, record=record)


def attend(record: Attention, paged: bool, positions: Tensor) -> Call:
    """Return the kernel call that computes the attention of `record` over a contiguous or a `paged` cache, with queries
    at `positions` (B, T). Raises NotCompilable for caches of other shapes."""
    rows, tokens, heads, d_head = record.q.shape
    (kv_heads, *key_widths), (value_heads, *value_widths) = record.shapes
    if key_widths != [d_head] or len(value_widths) != 1 or value_heads != kv_heads or heads % kv_heads:
        raise NotCompilable("attention to a cache of another form")
    given = record.sinks is not None, record.slopes is not None
    options = attention.Options(record.window, record.scale, record.softcap, *given)
    form = attention.Form(heads, kv_heads, d_head, value_widths[0], DTYPES[record.q.dtype], options, paged)
    arguments = attention.AttentionArguments(
        y=contiguous_address(record.y),
        q=contiguous_address(record.q),
        sinks=address(record.sinks, record.q.dtype, heads),
        slopes=address(record.slopes, torch.float32, heads),
        positions=contiguous_address(positions),
        queries=rows * tokens,
        tokens=tokens,
        items=rows * tokens * kv_heads,
    )
    return Call(("attend", form), attention.attend(form), arguments, heads * d_head >= MIN_PARALLEL_HEADS, record)


def operation_calls(operation: Operation) -> list[Call]:
    """Return the kernel calls that compute a recorded operation of PyTorch. Raises NotCompilable for an operation or a
    dtype without a kernel."""
    for tensor in tensors_in(operation.result):
        if tensor.dtype not in DTYPES:
            raise NotCompilable(f"{label(operation)} in {str(tensor.dtype).removeprefix('torch.')}")
    return OPERATIONS.get(name_of(operation).removesuffix("_"), unknown)(operation)


def contiguous_address(tensor: Tensor) -> int:
    """Return the memory address of a contiguous tensor. Raises Unreadable for any other tensor."""
    return address(tensor, tensor.dtype, *tensor.shape)


def unknown(operation: Operation) -> list[Call]:
    raise NotCompilable(name_of(operation))


def target_of(operation: Operation) -> Tensor:
    """Return the tensor that a recorded operation of PyTorch writes its result to."""
    result = operation.arguments[0] if operation.function._schema.is_mutable else operation.result
    return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]


def each(key: tuple[Any, ...], formula: Formula, out: Tensor, operands: Sequence[Tensor]) -> Call:
    """Return the call of an elementwise kernel, which writes formula(operands) to `out`. `key` identifies the formula,
    so that equal kernels are compiled once. Raises NotCompilable for a dtype without a kernel."""
    if any(t.dtype not in DTYPES for t in operands):
        raise NotCompilable(f"{key[0]} of {operands[0].dtype}")
    layouts = merged([Layout.of(out), *(Layout.of(t, out.shape) for t in operands)])
    structure, addresses = elementwise.operands(len(operands)), [strided_address(t) for t in (out, *operands)]
    form = tuple((layout.shape[1:], layout.strides, layout.dtype) for layout in layouts)
    arguments = structure(*addresses, items=layouts[0].shape[0])
    return Call((*key, form), elementwise.elementwise(formula, layouts), arguments)


def binary(of_floats: str, of_integers: str | None) -> Callable[[Operation], list[Call]]:
    """Return the function that translates an operation of two operands, one of which may be a number, to kernel calls.
    `of_floats` and `of_integers` name the methods of `Code` that compute the operation; None if integers are not
    supported. The function raises NotCompilable for other dtypes."""

    def lowered(operation: Operation) -> list[Call]:
        out, pair = target_of(operation), operation.arguments[:2]
        if name_of(operation) == "rsub":
            pair = pair[1], pair[0]
        operands = [x for x in pair if isinstance(x, Tensor)]
        integral = out.dtype == torch.int64
        if operation.options.get("alpha", 1) != 1 or operation.options.get("rounding_mode"):
            raise NotCompilable(name_of(operation))
        if any((x.dtype == torch.int64) != integral for x in operands) or (integral and of_integers is None):
            raise NotCompilable(f"{name_of(operation)} of integers")

        def formula(code: Code, *values: Any) -> Any:
            left = iter(values)
            both = [next(left) if isinstance(x, Tensor) else like(code, values[0], x) for x in pair]
            return getattr(code, of_integers if integral and of_integers else of_floats)(*both)

        return [
            each((operation.function, *(None if isinstance(x, Tensor) else x for x in pair)), formula, out, operands)
        ]

    return lowered


def unary(formula: Callable[..., Any], *defaults: Any) -> Callable[[Operation], list[Call]]:
    """Return the function that translates an operation of one operand to kernel calls. Further arguments of `formula`
    are the operation's numbers, by default `defaults`. The function raises NotCompilable for parameters that are
    tensors."""

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
    """Translate a copy to another dtype or layout to a kernel call. Raises NotCompilable for a conversion to
    integers."""
    out = target_of(operation)
    source = operation.arguments[1] if name_of(operation) == "copy_" else operation.arguments[0]
    if out.dtype == torch.int64 and source.dtype != torch.int64:
        raise NotCompilable("a conversion to integers")
    to_float = source.dtype == torch.int64 != out.dtype
    formula = (lambda code, x: code.sitofp(x, elementwise.FLOAT)) if to_float else (lambda code, x: x)
    return [each(("copy", to_float), formula, out, [source])]


def joined(operation: Operation) -> list[Call]:
    """Translate `torch.cat` and `torch.stack` to one kernel call per input, each a copy."""
    parts, dim = operation.arguments[0], operation.arguments[1] if len(operation.arguments) > 1 else 0
    if name_of(operation) == "stack":
        targets = operation.result.unbind(dim)
    else:
        targets = operation.result.split([part.size(dim) for part in parts], dim)
    return [each(("copy", False), lambda code, x: x, out, [part]) for out, part in zip(targets, parts) if part.numel()]


def product(operation: Operation) -> list[Call]:
    """Translate `mm` and `addmm` with a weight to a kernel call. Raises NotCompilable for products of another form,
    TooManyRows for more rows than the kernel multiplies fast."""
    bias = operation.arguments[0] if name_of(operation) == "addmm" else None
    x, transposed = operation.arguments[-2:]
    weight, out = transposed.t(), operation.result
    rows, (outputs, inputs) = len(x), weight.shape
    if operation.options:
        raise NotCompilable("a product in another form")
    if rows > max_rows(x.dtype):
        raise TooManyRows(f"{rows} rows")
    pointer = address(weight, x.dtype, outputs, inputs)
    return [product_call(DTYPES[x.dtype], x, (pointer, pointer), bias, out, outputs)]


def quantized_product(operation: Operation) -> list[Call]:
    """Translate a product with a quantized weight, given by codes and scales, to a kernel call."""
    x, codes, scales, bias = operation.arguments
    weight_format = "int8" if codes.dtype == torch.int8 else "int4"
    pointers = weight_addresses(codes, scales, x.size(-1))
    return [product_call(weight_format, x, pointers, bias, operation.result, len(codes))]


def product_call(
    weight_format: str, x: Tensor, pointers: tuple[int, int], bias: Tensor | None, out: Tensor, outputs: int
) -> Call:
    """Return the kernel call that multiplies x (..., I) with a weight in `weight_format`, given the addresses
    `pointers` of the weight and its scales, and adds `bias`; `out` is (..., O), where O is `outputs`."""
    inputs, dtype, biased = x.size(-1), DTYPES[x.dtype], bias is not None
    arguments = ProductArguments(
        x=contiguous_address(x),
        weight=pointers[0],
        scales=pointers[1],
        bias=address(bias, x.dtype, outputs),
        y=address(out, x.dtype, *x.shape[:-1], outputs),
        rows=x.numel() // inputs,
        outputs=outputs,
        inputs=inputs,
        items=outputs,
    )
    key, emitted = ("product", weight_format, dtype, biased), emit(weight_format, dtype, biased)
    return Call(key, emitted, arguments, parallel=outputs * inputs >= MIN_PARALLEL)


def average(operation: Operation) -> list[Call]:
    """Translate `mean` over the last dimension to a kernel call. Raises NotCompilable for other dimensions."""
    x, *dims = operation.arguments[:2]
    last = dims and dims[0] and [d % x.dim() for d in dims[0]] == [x.dim() - 1]
    if not last or operation.result.dtype != torch.float32:
        raise NotCompilable("a mean over other dimensions than the last")
    arguments = elementwise.MeanArguments(
        out=contiguous_address(operation.result), x=contiguous_address(x), items=x.numel() // x.size(-1)
    )
    return [Call(("mean", x.size(-1), x.dtype), elementwise.mean(Layout.of(x)), arguments)]


def layer_norm(operation: Operation) -> list[Call]:
    x, shape, weight, bias, eps = operation.arguments
    out, width = operation.result[0], x.size(-1)
    if len(shape) != 1:
        raise NotCompilable("a layer norm over several dimensions")
    emitted = elementwise.layer_norm(Layout.of(x), eps, weight is not None, bias is not None)
    key = "layer_norm", width, x.dtype, eps, weight is None, bias is None
    arguments = elementwise.LayerNormArguments(
        out=address(out, x.dtype, *x.shape),
        x=contiguous_address(x),
        weight=address(weight, x.dtype, width),
        bias=address(bias, x.dtype, width),
        items=x.numel() // width,
    )
    return [Call(key, emitted, arguments)]


def embedding(operation: Operation) -> list[Call]:
    weight, ids = operation.arguments[:2]
    if ids.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise NotCompilable("an embedding in another form")
    arguments = elementwise.GatherArguments(
        out=contiguous_address(operation.result),
        weight=contiguous_address(weight),
        ids=contiguous_address(ids),
        rows=len(weight),
        items=ids.numel(),
    )
    emitted = elementwise.gather(Layout.of(weight), DTYPES[ids.dtype])
    return [Call(("embedding", weight.size(-1), weight.dtype), emitted, arguments)]


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
