"""Position vectors that are added to embeddings.

Shapes: B batch, T tokens in this call, D d_model.
"""

import torch
from torch import Tensor, nn

from onward.config.added_positions import Sinusoidal
from onward.model.context import angles_at


class LearnedPositionModule(nn.Module):
    """A table of trained position vectors, which are added to the embeddings: positions (B, T) -> (B, T, D)."""

    def __init__(self, length: int, width: int, offset: int) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(length + offset, width))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        rows = (positions + self.offset).clamp(max=len(self.weight) - 1)  # padding may lie beyond
        return nn.functional.embedding(rows, self.weight).to(dtype)


class SinusoidalPositionModule(nn.Module):
    """Fixed position vectors, which are added to the embeddings, sines at even and cosines at odd indices (Vaswani et
    al. 2017) or, with the order "halves", all sines first: positions (B, T) -> (B, T, D)."""

    def __init__(self, width: int, part: Sinusoidal) -> None:
        super().__init__()
        self.width, self.part = width, part
        self.dim = -1 if part.order == "pairs" else -2  # axis of sine and cosine in (B, T, D/2, 2) or (B, T, 2, D/2)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        exact = (positions + self.part.offset).to(torch.promote_types(dtype, torch.float32))
        angles = angles_at(exact, self.part.theta, self.width)
        return torch.stack([angles.sin(), angles.cos()], self.dim).flatten(-2).to(dtype)
