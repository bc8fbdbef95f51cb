"""Feed-forwards other than the plain and the gated one, x (..., D) -> (..., D)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.config.feedforward_parts import Gated
from onward.model.layers import GatedFeedForwardModule, PlainFeedForwardModule


class CombiningFeedForwardModule(GatedFeedForwardModule):
    """A feed-forward with a gate in which the function `combine` of the part joins the outputs of the gate and up
    projections."""

    def __init__(self, part: Gated, width: int, d_ff: int, dropout: float) -> None:
        super().__init__(width, d_ff, part.act, part.bias, dropout)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        combine = self.part.combine
        assert combine is not None
        return self.dropout(self.down(combine(self.act, self.gate(x), self.up(x))))  # type: ignore[no-any-return]


class XIELUFeedForwardModule(PlainFeedForwardModule):
    """A feed-forward without a gate, with the activation function xIELU: down(xielu(up(x)))."""

    def __init__(self, width: int, d_ff: int, bias: bool, dropout: float) -> None:
        super().__init__(width, d_ff, "relu", bias, dropout)
        self.act = XIELUModule()


class XIELUModule(nn.Module):
    """The activation function xIELU (Huang and Schlag 2024, arXiv:2411.13010): a x ** 2 + beta x for x > 0, else
    b (exp(x) - 1 - x) + beta x, where a = softplus(alpha_p) and b = beta + softplus(alpha_n) are learned and begin as
    0.8. `beta` and `eps` are constants that checkpoints contain; the exponential takes min(x, eps)."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.tensor([math.log(math.expm1(a))])) for a in (0.8, 0.3))
        self.beta, self.eps = (nn.Parameter(torch.tensor([one]), requires_grad=False) for one in (0.5, -1e-6))

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        above, curved = F.relu(x), torch.expm1(torch.minimum(x, self.eps)) - x
        return a * above * above + (1 - above.sign()) * b * curved + self.beta * x
