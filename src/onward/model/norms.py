"""Norms beyond torch's own."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNormModule(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * (weight + offset) over the last dimension, in at least fp32."""

    def __init__(self, width: int, eps: float, offset: float) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(exact)
        return F.rms_norm(x.to(exact), weight.shape, weight + self.offset if self.offset else weight, self.eps).type_as(
            x
        )
