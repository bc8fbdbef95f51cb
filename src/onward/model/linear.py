"""The linear layer of the model."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from onward.kernels.operations import is_worth, linear


class Linear(nn.Linear):
    """A linear layer, x Wᵀ + bias: (..., I) -> (..., O), computed by a CPU kernel for few rows."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def outputs_of(layers: Sequence[nn.Module], x: Tensor) -> Sequence[Tensor]:
    """Return the outputs of several layers for the same input x (..., I), one per layer. With gradients on a CPU,
    linear layers without hooks are computed as one product, since three small products take 1.3 times as long."""
    plain = [layer for layer in layers if is_plain(layer)]
    if len(plain) == len(layers) and torch.is_grad_enabled() and is_worth("outputs_of", x):
        weights, biases = [layer.weight for layer in plain], [layer.bias for layer in plain if layer.bias is not None]
        if len(biases) in (0, len(plain)) and len({weight.dtype for weight in weights}) == 1:
            y = F.linear(x, torch.cat([*weights]), torch.cat([*biases]) if biases else None)
            return y.split([len(weight) for weight in weights], -1)
    return [layer(x) for layer in layers]


def is_plain(layer: nn.Module) -> TypeGuard[Linear]:
    """Return whether a layer is a Linear, not a subclass, without hooks or replaced methods, so that its weight may be
    used directly instead of calling it."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    unchanged = type(layer) is Linear and "forward" not in vars(layer) and not any(hooks)
    return unchanged and not torch_module._has_any_global_hook()
