"""The optimizer NorMuon."""

import torch
from torch import Tensor

from onward.training.step.muon import Muon

ROWS = 0.95  # decay rate of the mean squares of rows (beta2 of the paper)


class NorMuon(Muon):
    """Muon with one learning rate for each neuron: the rows of an update, whose sizes differ after orthogonalization,
    are divided by the root of a running mean of their squares (Li et al. 2025, arXiv:2510.05491). The norm of the whole
    update is preserved."""

    def scaled(self, parameter: Tensor, update: Tensor) -> Tensor:
        squares = update.float().square().mean(dim=-1)
        state = self.state[parameter]
        if "row_squares" not in state:
            state["row_squares"] = torch.zeros_like(squares)
        mean = state["row_squares"].lerp_(squares, 1 - ROWS)
        factors = mean.clamp(min=1e-20).rsqrt()
        size = (squares.sum(-1) / (squares * factors.square()).sum(-1).clamp(min=1e-20)).sqrt()
        return update * (factors * size[..., None])[..., None]
