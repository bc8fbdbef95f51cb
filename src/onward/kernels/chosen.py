"""Products of tokens with the weights of the experts that a router has chosen for them.

Shapes: N tokens, A assignments (of tokens to experts), X experts, I inputs, O outputs.
"""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.kernels.available import unavailable
from onward.kernels.memory import DTYPES, MIN_PARALLEL, Unreadable, address, buffer
from onward.kernels.operations import max_rows, takes_kernels

MAX_ROWS = {torch.bfloat16: 128}  # number of rows per expert beyond which PyTorch's matmul is faster


def max_assignments(dtype: torch.dtype, experts: int) -> int:
    """The largest number of assignments of tokens to experts for which the kernel is at least as fast as one matmul per
    expert."""
    rows = max_rows(dtype)
    return experts * min(rows, MAX_ROWS.get(dtype, rows))


def takes_kernel(tokens: Tensor, experts: Tensor, count: int) -> bool:
    few = 0 < experts.numel() <= max_assignments(tokens.dtype, count)
    return few and takes_kernels(tokens) and not unavailable()


def plain_chosen_linear(x: Tensor, experts: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    """Multiply rows of x (N, I) with the weights of their experts in plain PyTorch: `experts` (A,) are the ids of the A
    / N experts of each row, row by row; `weights` (X, O, I) and `biases` (X, O) belong to all X experts. Returns (A,
    O), with NaN for an id of no expert."""
    rows = x.repeat_interleave(len(experts) // len(x), 0)
    y = x.new_full((len(experts), weights.size(1)), math.nan)
    for expert, weight in enumerate(weights):
        own = experts == expert
        y[own] = F.linear(rows[own], weight, None if biases is None else biases[expert])
    return y


def chosen_linear(x: Tensor, experts: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    """Compute `plain_chosen_linear`; on a CPU, for few assignments, a kernel reads only the weights of the chosen
    experts."""
    if takes_kernel(x, experts, len(weights)):
        with suppress(Unreadable):
            return by_kernel(x, experts, weights, biases)
    return plain_chosen_linear(x, experts, weights, biases)


def by_kernel(x: Tensor, experts: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    from onward.kernels.llvm.chosen import chosen

    (count, outputs, inputs), dtype, assignments = weights.shape, x.dtype, len(experts)
    x, experts = x.contiguous(), experts.contiguous()
    y, target = buffer((assignments, outputs), dtype)
    chosen(DTYPES[dtype], biases is not None)(
        target,
        address(x, dtype, len(x), inputs),
        address(experts, torch.int64, assignments),
        address(weights, dtype, count, outputs, inputs),
        address(biases, dtype, count, outputs),
        assignments,
        assignments // len(x),
        count,
        outputs,
        inputs,
        outputs,
        torch.get_num_threads() if outputs * inputs >= MIN_PARALLEL else 1,
    )
    return y


LIBRARY = torch.library.Library("onward", "FRAGMENT")  # a recorded decoding step has the product as one operation
LIBRARY.define("chosen_linear(Tensor x, Tensor experts, Tensor weights, Tensor? biases) -> Tensor")
LIBRARY.impl("chosen_linear", chosen_linear, "CompositeExplicitAutograd")
