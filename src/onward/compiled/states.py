"""Lowering of recurrent layers: calls of kernels that advance their states in the memory of a cache."""

from __future__ import annotations

from torch import Tensor

from onward.compiled.calls import DTYPES, Call, contiguous_address
from onward.compiled.recording import Convolved, Recurred
from onward.kernels.llvm import recurrence
from onward.kernels.memory import MIN_PARALLEL


def recurred(record: Recurred, positions: Tensor) -> Call:
    """Return the kernel call that repeats the recurrence of `record`, with tokens at `positions` (B, T)."""
    (rows, groups, shared, tokens, d_value), (keys, d_key) = record.y.shape, (record.k.size(2), record.k.size(4))
    form = recurrence.RecurrenceForm(
        groups * shared, shared // keys, d_key, d_value, record.decay.size(4), record.beta is not None
    )
    arguments = recurrence.RecurrenceArguments(
        positions=contiguous_address(positions),
        tokens=tokens,
        y=contiguous_address(record.y),
        q=contiguous_address(record.q),
        k=contiguous_address(record.k),
        v=contiguous_address(record.v),
        decay=contiguous_address(record.decay),
        beta=0 if record.beta is None else contiguous_address(record.beta),
        items=rows * form.heads,
    )
    parallel = rows * form.heads * d_key * d_value >= MIN_PARALLEL
    return Call(("recurrence", form), recurrence.recurrence(form), arguments, parallel, record)


def convolved(record: Convolved, positions: Tensor) -> Call:
    """Return the kernel call that repeats the convolution of `record`, with tokens at `positions` (B, T)."""
    (rows, tokens, width), taps = record.x.shape, len(record.weight)
    arguments = recurrence.ConvolutionArguments(
        positions=contiguous_address(positions),
        tokens=tokens,
        y=contiguous_address(record.y),
        x=contiguous_address(record.x),
        weight=contiguous_address(record.weight),
        items=rows,
    )
    form, parallel = (width, taps, DTYPES[record.x.dtype]), rows * tokens * width >= MIN_PARALLEL
    return Call(("convolution", *form), recurrence.convolution(*form), arguments, parallel, record)
