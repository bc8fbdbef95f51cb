"""The pre-norm block and its layers except attention: linear layers, norms and feed-forwards.

Norms compute in at least fp32 and return the dtype that the next matmul uses. Under autocast this is autocast's dtype,
so that one conversion here saves a conversion in each of the next matmuls.
"""

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from onward.config.feedforward_parts import ActivationName
from onward.kernels.operations import ACTIVATIONS, gate, is_worth, linear, rms_norm
from onward.model import activations
from onward.model.activations import Activation, Declarations, Input, Output
from onward.model.context import AttentionContext

NewNorm = Callable[..., nn.Module]  # makes a norm over a last dimension of the given width, by default d_model


class Linear(nn.Linear):
    """A linear layer, x Wᵀ + bias: (..., I) -> (..., O), computed by a CPU kernel for few rows."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def outputs_of(layers: Sequence[nn.Module], x: Tensor) -> Sequence[Tensor]:
    """Return the outputs of several layers for the same input x (..., I), one per layer. With gradients on a CPU,
    linear layers without hooks may be computed as one product, since three small products take 1.3 times as long."""
    if torch.is_grad_enabled() and all(map(is_plain, layers)) and is_worth("outputs_of", x):
        plain = [layer for layer in layers if isinstance(layer, Linear)]
        weights, biases = [layer.weight for layer in plain], [layer.bias for layer in plain if layer.bias is not None]
        if len(biases) in (0, len(plain)) and len({weight.dtype for weight in weights}) == 1:
            y = F.linear(x, torch.cat([*weights]), torch.cat([*biases]) if biases else None)
            return y.split([len(weight) for weight in weights], -1)
    return [layer(x) for layer in layers]


def is_plain(layer: nn.Module) -> TypeGuard[Linear]:
    """Whether a layer is a Linear, not a subclass, without hooks or a replaced `forward`, so that its weight may be
    used directly instead of calling it."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    unchanged = type(layer) is Linear and "forward" not in vars(layer) and not any(hooks)
    return unchanged and not torch_module._has_any_global_hook()


class RMSNormModule(nn.Module):
    """RMSNorm: x / sqrt(mean(x ** 2) + eps) * (weight + offset) over the last dimension."""

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset, working_dtype(x))

    def activations(self) -> Declarations:
        return activations.norm(len(self.weight), centered=False)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which matmuls with x are computed: autocast's where it is enabled, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class PlainFeedForwardModule(nn.Module):
    """A feed-forward without a gate, x (..., D) -> (..., D): down(act(up(x))), where `act` is the activation
    function."""

    def __init__(self, width: int, d_ff: int, act: ActivationName, bias: bool, dropout: float) -> None:
        super().__init__()
        self.act = ACTIVATIONS[act]
        self.up = Linear(width, d_ff, bias=bias)
        self.down = Linear(d_ff, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.act(self.up(x))))

    def activations(self) -> Declarations:
        units = "B", "T", self.down.in_features
        return {"pre": Activation(Output("up"), units, 2), "post": Activation(Input("down"), units, 2)}


class GatedFeedForwardModule(PlainFeedForwardModule):
    """A feed-forward with a gate, x (..., D) -> (..., D): down(act(gate(x)) * up(x)), where `act` is the activation
    function."""

    def __init__(self, width: int, d_ff: int, act: ActivationName, bias: bool, dropout: float) -> None:
        super().__init__(width, d_ff, act, bias, dropout)
        self.activation = act
        self.gate = Linear(width, d_ff, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(gate(self.gate(x), self.up(x), self.activation)))

    def activations(self) -> Declarations:
        units = "B", "T", self.down.in_features
        steps = {"pre": Output("gate"), "up": Output("up"), "post": Input("down")}
        return {name: Activation(where, units, 2) for name, where in steps.items()}


class PreNormModule(nn.Module):
    """A pre-norm block: x + attn(norm(x)), then x + mlp(norm(x)).

    `attn` and `mlp` are the attention and feed-forward modules of the layer; `norm` is a function that returns a new
    norm.

    The class attribute `mid` tells tracing where the activation `mid` is, the residual stream between attention and
    feed-forward. It has two names: the submodule that reads this stream, and the submodule whose input is the sum of
    this stream and the feed-forward's output ("": the sum is the block's output). It is None in a subclass whose
    forward has no such stream.
    """

    mid: tuple[str, str] | None = ("mlp_norm", "")

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: NewNorm) -> None:
        super().__init__()
        self.attn_norm = norm()
        self.attn = attn
        self.mlp_norm = norm()
        self.mlp = mlp

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = x + self.attn(self.attn_norm(x), context)
        return x + self.mlp(self.mlp_norm(x))

    def activations(self) -> Declarations:
        return activations.block(self, self.mid)
