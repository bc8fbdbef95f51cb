"""Lowering: translate the recorded operations of a step to calls of kernels, whose arguments are checked addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.compiled.calls import DTYPES, Call, contiguous_address, unreadable_is_not_compilable
from onward.compiled.elementwise import ELEMENTWISE
from onward.compiled.interface import NotCompilable
from onward.compiled.needed import label, name_of, tensors_in
from onward.compiled.recording import Attention, Convolved, Operation, Recurred, StepRecord, Write
from onward.compiled.rows import ROWS
from onward.compiled.states import convolved, recurred
from onward.kernels.llvm import cached_attention, writes
from onward.kernels.memory import address
from onward.model.cache import KVCache
from onward.model.layer_cache import LayerCache

OPERATIONS = ELEMENTWISE | ROWS  # lowering functions by operation name
MIN_PARALLEL_HEADS = 512  # minimum heads * d_head for which several threads are faster than one


def lower(records: Sequence[StepRecord], cache: KVCache, positions: Tensor) -> list[Call]:
    """Translate the records of a decoding step to calls of kernels. `cache` has the kinds of layers that the kernels
    read; `positions` (B, T) is the tensor of positions in the recording. Raises NotCompilable for an operation or
    tensor without a kernel."""
    calls = []
    with unreadable_is_not_compilable():
        for record in records:
            if isinstance(record, Write):
                calls.append(write(record, cache.layers[record.layer], positions))
            elif isinstance(record, Attention):
                calls.append(attend(record, cache.layers[record.layer], positions))
            elif isinstance(record, Recurred):
                calls.append(recurred(record, positions))
            elif isinstance(record, Convolved):
                calls.append(convolved(record, positions))
            else:
                calls += operation_calls(record)
    return calls


def lower_operations(records: Sequence[StepRecord]) -> list[Call]:
    """Translate the records of a function without a cache to calls of kernels, as `lower` does."""
    with unreadable_is_not_compilable():
        return [call for record in records if isinstance(record, Operation) for call in operation_calls(record)]


def write(record: Write, layer: LayerCache, positions: Tensor) -> Call:
    """Return the kernel call that writes the vectors of `record` to a cache of the kind of `layer`, at `positions`
    (B, T)."""
    (*_, width), dtype, paged = record.vectors.shape, DTYPES[record.vectors.dtype], layer.table is not None
    count = record.vectors[0, 0].numel() // width
    arguments = writes.WriteArguments(
        vectors=contiguous_address(record.vectors),
        positions=contiguous_address(positions),
        tokens=positions.size(1),
        items=positions.numel(),
    )
    if layer.quantized:
        form = count, width, dtype, paged
        return Call(("write codes", *form), writes.write_codes(*form), arguments, record=record)
    width *= count
    return Call(("write", width, dtype, paged), writes.write(width, dtype, paged), arguments, record=record)


def attend(record: Attention, layer: LayerCache, positions: Tensor) -> Call:
    """Return the kernel call that computes the attention of `record` over a cache of the kind of `layer`, with queries
    at `positions` (B, T). Raises NotCompilable unless every cache entry has the shape (heads, width), and the heads and
    widths fit the queries."""
    rows, tokens, heads, d_head = record.q.shape
    if any(len(shape) != 2 for shape in record.shapes):
        raise NotCompilable("attention to a cache whose entries do not have the shape (heads, width)")
    (kv_heads, d_key), (value_heads, d_value), *tails = record.shapes
    d_tail = sum(width for _, width in tails)
    if d_key + d_tail != d_head or {value_heads, *(n for n, _ in tails)} != {kv_heads} or heads % kv_heads:
        raise NotCompilable("attention to a cache whose heads or widths do not fit the queries")
    given = record.scale, record.softcap, record.sinks is not None, record.slopes is not None
    options = cached_attention.ScoreOptions(record.window, record.chunked, *given)
    paged, dtype = layer.table is not None, DTYPES[record.q.dtype]
    form = cached_attention.AttentionForm(
        heads, kv_heads, d_head, d_value, dtype, options, paged, d_tail, layer.quantized
    )
    arguments = cached_attention.AttentionArguments(
        y=contiguous_address(record.y),
        q=contiguous_address(record.q),
        sinks=address(record.sinks, record.q.dtype, heads),
        slopes=address(record.slopes, torch.float32, heads),
        positions=contiguous_address(positions),
        queries=rows * tokens,
        tokens=tokens,
        items=rows * tokens * heads // form.group,
    )
    return Call(
        ("attend", form), cached_attention.attend(form), arguments, heads * d_head >= MIN_PARALLEL_HEADS, record
    )


def operation_calls(operation: Operation) -> list[Call]:
    """Return the kernel calls that compute a recorded operation of PyTorch. Raises NotCompilable for an operation or a
    dtype without a kernel."""
    for tensor in tensors_in(operation.result):
        if tensor.dtype not in DTYPES:
            raise NotCompilable(f"{label(operation)} in {str(tensor.dtype).removeprefix('torch.')}")
    name = name_of(operation).removesuffix("_")
    if name not in OPERATIONS:
        raise NotCompilable(name_of(operation))
    return OPERATIONS[name](operation)
