"""Constant factors of embeddings and logits, and the cap of logits."""

import torch
from torch import Tensor, nn


class Scale(nn.Module):
    """A module that multiplies x by the constant `factor`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class RoundedScale(Scale):
    """A module that multiplies x by the constant `factor`, which is first rounded to the dtype of x (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_full((), self.factor)


class Softcap(nn.Module):
    """A module that limits values smoothly to between -cap and cap: cap * tanh(x / cap) (Gemma 2)."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)
