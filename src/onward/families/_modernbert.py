"""The last norm of ModernBERT's decoders, which contains an additional linear layer. Shapes: D d_model."""

from collections.abc import Callable

from torch import Tensor, nn

from onward.model.layers import Linear
from onward.model.norms import LayerNormModule


class HeadNormModule(nn.Module):
    """last(act(dense(first(x)))), (..., D) -> (..., D), where `first` and `last` are LayerNorms."""

    def __init__(self, width: int, eps: float, norm_bias: bool, bias: bool, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = (LayerNormModule(width, eps, bias=norm_bias) for _ in range(2))
        self.dense, self.act = Linear(width, width, bias=bias), act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.act(self.dense(self.first(x))))
        return y
