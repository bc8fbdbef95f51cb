"""The linear layer of the model."""

from torch import Tensor, nn

from onward.kernels.linear import linear


class Linear(nn.Linear):
    """x Wᵀ + bias: (..., I) -> (..., O)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
