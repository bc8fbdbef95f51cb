"""Feed-forward modules, plain and gated: x (..., D) -> (..., D), each token by itself."""

from torch import Tensor, nn

from onward.config import parts
from onward.kernels.operations import gate
from onward.kernels.plain import ACTIVATIONS
from onward.model.activations import Activation, Declarations, Input, Output
from onward.model.linear import Linear


class PlainFeedForwardModule(nn.Module):
    """A feed-forward without a gate, x (..., D) -> (..., D): down(act(up(x))), where `act` is the activation
    function."""

    def __init__(self, width: int, d_ff: int, act: parts.ActivationName, bias: bool, dropout: float) -> None:
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

    def __init__(self, width: int, d_ff: int, act: parts.ActivationName, bias: bool, dropout: float) -> None:
        super().__init__(width, d_ff, act, bias, dropout)
        self.activation = act
        self.gate = Linear(width, d_ff, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(gate(self.gate(x), self.up(x), self.activation)))

    def activations(self) -> Declarations:
        units = "B", "T", self.down.in_features
        steps = {"pre": Output("gate"), "up": Output("up"), "post": Input("down")}
        return {name: Activation(where, units, 2) for name, where in steps.items()}
