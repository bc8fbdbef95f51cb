"""Activation functions, and the gate of a gated feed-forward (GLU variants, Shazeer 2020) as one kernel, with another
for its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from onward.config.parts import Activation
from onward.kernels.memory import buffer, fits
from onward.kernels.rules import DTYPES, emitter, is_worth, launch, run


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x) ** 2, elementwise (Primer, So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": squared_relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def plain_gate(x: Tensor, y: Tensor, activation: Activation) -> Tensor:
    """Return activation(x) * y, elementwise, for x and y of the same shape, as in a gated feed-forward."""
    return ACTIVATIONS[activation](x) * y


def gate(x: Tensor, y: Tensor, activation: Activation) -> Tensor:
    """Return activation(x) * y, elementwise, as in a gated feed-forward: computed by `plain_gate`, or on a CPU by a
    kernel if x is large enough."""
    if takes_kernel(x, y):
        return Gate.apply(x, y, activation)  # type: ignore[no-any-return]
    return plain_gate(x, y, activation)


def takes_kernel(x: Tensor, y: Tensor) -> bool:
    """Return whether the CPU kernel, not PyTorch, computes the product activation(x) * y of a gated feed-forward."""
    return is_worth("gate", x) and all(fits(each, x.dtype, *x.shape) and each.is_contiguous() for each in (x, y))


class Gate(Function):
    """The autograd function of `gate`: one kernel computes the product, and another both gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.activation = activation
        return run(emitter("fused").gate(activation, DTYPES[x.dtype]), x, y, items=x.numel())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        (of_x, x_target), (of_y, y_target) = buffer(x.shape, x.dtype), buffer(x.shape, x.dtype)
        kernel = emitter("fused").gate_gradient(ctx.activation, DTYPES[x.dtype])
        launch(kernel, x_target, y_target, grad.contiguous(), x, y, items=x.numel())
        return of_x, of_y, None
