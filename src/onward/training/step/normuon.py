"""The optimizer NorMuon."""

import math

import torch
from torch import Tensor

from onward.training.step.muon import Muon

ROWS = 0.95  # decay rate of the mean squares of rows (beta2 of the paper)


class NorMuon(Muon):
    """Muon with one learning rate for each neuron: the rows of an update, whose sizes differ after orthogonalization,
    are divided by the root of a running mean of their squares (Li et al. 2025, arXiv:2510.05491, Algorithm 1). The
    whole update keeps the root mean square of AdamW's."""

    def scaled(self, parameter: Tensor, update: Tensor) -> Tensor:
        squares = update.float().square().mean(dim=-1)
        state = self.state[parameter]
        if "row_squares" not in state:
            state["row_squares"] = torch.zeros_like(squares)
        mean = state["row_squares"].lerp_(squares, 1 - ROWS)
        even = update * mean.clamp(min=1e-20).rsqrt()[..., None]
        size = even.square().mean(dim=(-2, -1), keepdim=True).clamp(min=1e-20).sqrt()
        return even / (size * math.sqrt(max(update.shape[-2:])))
