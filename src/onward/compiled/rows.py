"""Lowering of operations on rows of numbers: products, reductions, norms, selections and lookups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onward.compiled.calls import DTYPES, Call, contiguous_address
from onward.compiled.elementwise import copied
from onward.compiled.interface import NotCompilable, TooManyRows
from onward.compiled.needed import name_of
from onward.compiled.recording import Operation
from onward.kernels.chosen import max_assignments
from onward.kernels.llvm import batches, chosen, draws, elementwise
from onward.kernels.llvm.elementwise import Layout
from onward.kernels.llvm.products import ProductArguments, emit
from onward.kernels.memory import MIN_PARALLEL, address, strided_address
from onward.kernels.operations import max_rows
from onward.kernels.quantized import weight_addresses


def product(operation: Operation) -> list[Call]:
    """Translate a recorded `mm` or `addmm` with a weight of the model to a kernel call. Raises NotCompilable for
    products with options such as alpha, TooManyRows for more rows than the kernel multiplies fast."""
    bias = operation.arguments[0] if name_of(operation) == "addmm" else None
    x, transposed = operation.arguments[-2:]
    weight, out = transposed.t(), operation.result
    rows, (outputs, inputs) = len(x), weight.shape
    if operation.options:
        raise NotCompilable("a product with options such as alpha")
    if rows > max_rows(x.dtype):
        raise TooManyRows(f"{rows} rows")
    pointer = address(weight, x.dtype, outputs, inputs)
    return [product_call(DTYPES[x.dtype], x, (pointer, pointer), bias, out, outputs)]


def quantized_product(operation: Operation) -> list[Call]:
    """Translate a recorded product with a quantized weight, given by its codes and scales, to a kernel call."""
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


def reduced(operation: Operation) -> list[Call]:
    """Translate a recorded `mean` or `sum` over the last dimension to a kernel call. Raises NotCompilable for other
    dimensions, and for dtypes other than fp32."""
    x, *dims = operation.arguments[:2]
    last = dims and dims[0] and [d % x.dim() for d in dims[0]] == [x.dim() - 1]
    if not last or operation.result.dtype != torch.float32:
        raise NotCompilable(
            f"a {name_of(operation)} over dimensions other than the last, or in a dtype other than fp32"
        )
    factor = 1 / x.size(-1) if name_of(operation) == "mean" else 1.0
    source, x = x, x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype)
    arguments = elementwise.SumArguments(
        out=contiguous_address(operation.result), x=contiguous_address(x), items=x.numel() // x.size(-1)
    )
    emitted, copies = elementwise.row_sums(Layout.of(x), factor), [] if x is source else [copied(source, x)]
    return [*copies, Call(("sum", factor, x.size(-1), x.dtype), emitted, arguments, memory=x)]


def chosen_product(operation: Operation) -> list[Call]:
    """Translate a recorded operation `chosen_linear`, products of tokens with the weights of their experts, to a kernel
    call. Raises TooManyRows for more assignments of tokens to experts than the kernel multiplies fast."""
    x, ids, weights, biases = operation.arguments
    (count, outputs, inputs), dtype, biased = weights.shape, DTYPES[x.dtype], biases is not None
    if len(ids) > max_assignments(x.dtype, count):
        raise TooManyRows(f"{len(ids)} assignments to experts")
    arguments = chosen.ChosenArguments(
        y=contiguous_address(operation.result),
        x=address(x, x.dtype, len(x), inputs),
        experts=address(ids, torch.int64, len(ids)),
        weights=address(weights, x.dtype, count, outputs, inputs),
        biases=address(biases, x.dtype, count, outputs),
        assignments=len(ids),
        repeats=len(ids) // len(x),
        count=count,
        outputs=outputs,
        inputs=inputs,
        items=outputs,
    )
    emitted = chosen.emit_chosen(dtype, biased)
    return [Call(("chosen", dtype, biased), emitted, arguments, parallel=outputs * inputs >= MIN_PARALLEL)]


def of_rows(operation: Operation, dim: int) -> tuple[Tensor, int]:
    """Return the first argument of a recorded operation, a tensor, and the size of its last dimension. Raises
    NotCompilable unless the operation works along the last dimension, `dim`, and the tensor is in fp32."""
    x = operation.arguments[0]
    if dim % x.dim() != x.dim() - 1 or x.dtype != torch.float32:
        raise NotCompilable(f"{name_of(operation)} over dimensions other than the last, or in a dtype other than fp32")
    return x, x.size(-1)


def softmax(operation: Operation) -> list[Call]:
    x, width = of_rows(operation, operation.arguments[1])
    out = contiguous_address(operation.result)
    arguments = chosen.SoftmaxArguments(out=out, x=contiguous_address(x), items=x.numel() // width)
    return [Call(("softmax", width), chosen.softmax(width), arguments)]


def top(operation: Operation) -> list[Call]:
    """Translate a recorded `topk` to a kernel call. Raises NotCompilable if it takes the smallest numbers."""
    given: list[Any] = [*operation.arguments[1:], *(-1, True)[len(operation.arguments) - 2 :]]
    count, dim, largest = given[:3]
    x, width = of_rows(operation, dim)
    if not largest:
        raise NotCompilable("topk of the smallest")
    values, indices = map(contiguous_address, operation.result)
    arguments = chosen.TopArguments(values=values, indices=indices, x=contiguous_address(x), items=x.numel() // width)
    return [Call(("top", width, count), chosen.top(width, count), arguments)]


def picked(operation: Operation) -> list[Call]:
    """Translate a recorded `gather` to a kernel call. Raises NotCompilable unless the index tensor has as many rows as
    the gathered tensor."""
    x, width = of_rows(operation, operation.arguments[1])
    indices = operation.arguments[2]
    if indices.shape[:-1] != x.shape[:-1]:
        raise NotCompilable("gather of other rows")
    arguments = chosen.PickArguments(
        out=contiguous_address(operation.result),
        x=contiguous_address(x),
        indices=contiguous_address(indices),
        items=indices.numel(),
    )
    return [Call(("pick", width, indices.size(-1)), chosen.pick(width, indices.size(-1)), arguments)]


def scattered(operation: Operation) -> list[Call]:
    """Translate a recorded `scatter` of one number to kernel calls: a copy of the tensor, then writes of the number at
    the indices. Raises NotCompilable if the values are a tensor, if there are options, or if the tensor and the indices
    have different numbers of rows."""
    x, width = of_rows(operation, operation.arguments[1])
    indices, value = operation.arguments[2:]
    out = operation.result
    if isinstance(value, Tensor) or operation.options or indices.shape[:-1] != x.shape[:-1]:
        raise NotCompilable("scatter of a tensor of values, with options, or with indices of another number of rows")
    arguments = chosen.PlaceArguments(
        out=contiguous_address(out), indices=contiguous_address(indices), items=indices.numel()
    )
    form = float(value), width, indices.size(-1)
    return [copied(x, out), Call(("place", *form), chosen.place(*form), arguments)]


def batched_product(operation: Operation) -> list[Call]:
    """Translate a recorded `bmm`, the product of pairs of matrices, to a kernel call. Raises NotCompilable for matrices
    with strides that the kernel does not support, TooManyRows for more rows than it multiplies fast."""
    x, weights = operation.arguments
    (count, rows, inputs), outputs = x.shape, weights.size(-1)
    transposed = weights.stride()[1:] == (1, inputs)
    if x.stride(-1) != 1 or not (transposed or weights.stride()[1:] == (outputs, 1)):
        raise NotCompilable("bmm of other strides")
    if rows > max_rows(x.dtype):
        raise TooManyRows(f"{rows} rows")
    arguments = batches.BatchArguments(
        y=contiguous_address(operation.result),
        x=strided_address(x),
        weights=strided_address(weights),
        x_matrix=x.stride(0),
        x_row=x.stride(1),
        weight_matrix=weights.stride(0),
        rows=rows,
        outputs=outputs,
        inputs=inputs,
        items=count,
    )
    form, parallel = (DTYPES[x.dtype], transposed), weights.numel() >= MIN_PARALLEL
    return [Call(("batches", *form), batches.batches(*form), arguments, parallel)]


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
        raise NotCompilable("an embedding with ids or weights of an unsupported dtype")
    arguments = elementwise.GatherArguments(
        out=contiguous_address(operation.result),
        weight=strided_address(weight),
        ids=contiguous_address(ids),
        rows=len(weight),
        items=ids.numel(),
    )
    emitted = elementwise.gather(Layout.of(weight), DTYPES[ids.dtype])
    return [Call(("embedding", weight.size(-1), weight.stride(), weight.dtype), emitted, arguments)]


def drawn(operation: Operation) -> list[Call]:
    """Translate a recorded draw of tokens to a kernel call."""
    logits, factors, seeds, index = operation.arguments
    arguments = draws.DrawArguments(
        tokens=contiguous_address(operation.result),
        logits=contiguous_address(logits),
        factors=address(factors, torch.float32, len(logits)),
        seeds=address(seeds, torch.int64, len(logits)),
        index=address(index, torch.int64, len(logits)),
        vocab_size=logits.size(1),
        items=len(logits),
    )
    dtype = DTYPES[logits.dtype]
    return [Call(("draw", dtype), draws.emit(dtype, False), arguments)]


ROWS: dict[str, Callable[[Operation], list[Call]]] = {
    "mm": product,
    "addmm": product,
    "quantized_linear": quantized_product,
    "mean": reduced,
    "sum": reduced,
    "_softmax": softmax,
    "topk": top,
    "gather": picked,
    "scatter": scattered,
    "bmm": batched_product,
    "chosen_linear": chosen_product,
    "native_layer_norm": layer_norm,
    "embedding": embedding,
    "drawn_tokens": drawn,
}
