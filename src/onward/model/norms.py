"""Norms other than RMSNorm: LayerNorm, norms without learned weights, and norms of single heads."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.model import activations
from onward.model.activations import Child, Declarations
from onward.model.layers import working_dtype


class LayerNormModule(nn.LayerNorm):
    """LayerNorm: (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(working_dtype(x))

    def activations(self) -> Declarations:
        return activations.norm(self.normalized_shape[-1], centered=True)


class PartialLayerNormModule(LayerNormModule):
    """LayerNorm without a weight, or with an offset that is added to the weight: (x - mean) / sqrt(variance + eps) *
    (weight + offset) + bias, where a missing weight counts as 1 - offset."""

    def __init__(self, width: int, eps: float, weight: bool, bias: bool, offset: float = 0.0) -> None:
        super().__init__(width, eps, elementwise_affine=False)
        self.offset = offset
        self.register_parameter("weight", nn.Parameter(torch.full((width,), 1.0 - offset)) if weight else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        weight = None if self.weight is None else self.weight.to(exact) + self.offset
        bias = None if self.bias is None else self.bias.to(exact)
        return F.layer_norm(x.to(exact), self.normalized_shape, weight, bias, self.eps).to(working_dtype(x))


class WeightlessRMSNormModule(nn.Module):
    """RMSNorm without a weight: x / sqrt(mean(x ** 2) + eps) over the last dimension."""

    weight = None

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(exact), (self.width,), None, self.eps).to(working_dtype(x))

    def activations(self) -> Declarations:
        return activations.norm(self.width, centered=False)


class HeadNorms(nn.ModuleList):
    """A list of norms, one per head: norm h is applied to head h of x (B, T, H, E), queries or keys."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([norm(head) for norm, head in zip(self, x.unbind(-2))], -2)

    def activations(self) -> Declarations:
        return {str(head): Child(str(head)) for head in range(len(self))}
