"""Norms. They compute in at least fp32 and return the dtype that the next matmul uses.

Under autocast that is autocast's dtype: one conversion here saves one in each of the matmuls that follow.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from onward.kernels.operations import rms_norm
from onward.model import activations
from onward.model.activations import Child, Declarations

NewNorm = Callable[..., nn.Module]  # makes a norm over a last dimension of the given width, by default d_model


def working_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which matmuls with x are computed: autocast's where it is enabled, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class LayerNormModule(nn.LayerNorm):
    """LayerNorm: (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(working_dtype(x))

    def activations(self) -> Declarations:
        return activations.norm(self.normalized_shape[-1], centered=True)


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


class HeadNorms(nn.ModuleList):
    """A list of norms, one per head: norm h is applied to head h of x (B, T, H, E), queries or keys."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([norm(head) for norm, head in zip(self, x.unbind(-2))], -2)

    def activations(self) -> Declarations:
        return {str(head): Child(str(head)) for head in range(len(self))}
