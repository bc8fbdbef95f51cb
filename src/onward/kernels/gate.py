"""Activation functions, and the gate of a gated feed-forward (GLU variants, Shazeer 2020) as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.config.parts import Activation
from onward.kernels.memory import fits
from onward.kernels.rules import DTYPES, emitter, is_worth, run

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def plain_gate(x: Tensor, y: Tensor, activation: Activation) -> Tensor:
    """Return activation(x) * y, elementwise, for x and y of the same shape."""
    return ACTIVATIONS[activation](x) * y


def gate(x: Tensor, y: Tensor, activation: Activation) -> Tensor:
    """Compute `plain_gate`, on a CPU by a kernel if no gradient is needed and x is large enough."""
    if takes_kernel(x, y):
        return run(emitter("fused").gate(activation, DTYPES[x.dtype]), x, y, items=x.numel())
    return plain_gate(x, y, activation)


def takes_kernel(x: Tensor, y: Tensor) -> bool:
    """Return whether the kernel, not PyTorch, computes the gate of these tensors."""
    if torch.is_grad_enabled() or not is_worth("gate", x):
        return False
    return all(fits(each, x.dtype, *x.shape) and each.is_contiguous() for each in (x, y))
