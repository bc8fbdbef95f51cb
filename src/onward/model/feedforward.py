"""Feed-forward modules, plain and gated: x (..., D) -> (..., D), each token by itself."""

from torch import Tensor, nn

from onward.config.decoder import Activation
from onward.kernels.gate import ACTIVATIONS, gate
from onward.model.linear import Linear


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
        return self.dropout(self.down(gate(self.gate(x), self.up(x), self.activation)))
