"""Feed-forward modules, plain and gated: x (..., D) -> (..., D), each token by itself."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from onward.config.decoder import Activation
from onward.kernels import fused
from onward.model.linear import Linear

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class PlainFeedForwardModule(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, width: int, d_ff: int, act: Activation, bias: bool, dropout: float) -> None:
        super().__init__()
        self.act = ACTIVATIONS[act]
        self.up = Linear(width, d_ff, bias=bias)
        self.down = Linear(d_ff, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.act(self.up(x))))


class GatedFeedForwardModule(PlainFeedForwardModule):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, width: int, d_ff: int, act: Activation, bias: bool, dropout: float) -> None:
        super().__init__(width, d_ff, act, bias, dropout)
        self.activation = act
        self.gate = Linear(width, d_ff, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        y = fused.gate(gate, up, self.activation)
        return self.dropout(self.down(self.act(gate) * up if y is None else y))
