"""Losses of preferences, as functions of log-probabilities; each returns one number per pair or answer.

A margin is log p(chosen) - log p(rejected) of the model less that of the reference, each the sum over an answer's
tokens; a mean margin has the mean over its tokens. beta weighs the divergence from the reference.

Shapes: M pairs or answers.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def dpo(margin: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log s(beta m) - e log s(-beta m), (M,): Rafailov et al. 2023, equation 7; with a share e of the pairs
    taken to be swapped, the conservative loss of Mitchell 2023."""
    return -(1 - smoothing) * F.logsigmoid(beta * margin) - smoothing * F.logsigmoid(-beta * margin)


def robust(margin: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """(-(1 - e) log s(beta m) + e log s(-beta m)) / (1 - 2 e), (M,): the loss of unswapped pairs in expectation, where
    a share e of them is swapped (Ray Chowdhury et al. 2024, equation 11)."""
    kept = (1 - smoothing) * F.logsigmoid(beta * margin)
    return (smoothing * F.logsigmoid(-beta * margin) - kept) / (1 - 2 * smoothing)


def ipo(mean_margin: Tensor, beta: float) -> Tensor:
    """(m - 1 / (2 beta))^2, (M,): Azar et al. 2023, equation 17, with the mean margin, as its authors computed it."""
    return (mean_margin - 1 / (2 * beta)).square()


def hinge(margin: Tensor, beta: float) -> Tensor:
    """max(0, 1 - beta m), (M,): SLiC, Zhao et al. 2023, with the reference of DPO."""
    return torch.relu(1 - beta * margin)


def kto(
    log_ratio: Tensor, wanted: Tensor, kl: Tensor, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> Tensor:
    """w (1 - s(beta (r - KL))) for wanted answers, w (1 - s(beta (KL - r))) for others, (M,): Ethayarajh et al. 2024,
    equation 7. r is log p(answer) of the model less that of the reference, KL () their divergence."""
    sign = wanted * 2.0 - 1.0
    weight = torch.where(wanted > 0, desirable, undesirable)
    return weight * (1 - torch.sigmoid(sign * beta * (log_ratio - kl)))


def orpo(mean_chosen: Tensor, mean_rejected: Tensor, beta: float) -> Tensor:
    """-log p(chosen) - beta log s(log odds ratio), (M,): Hong et al. 2024, equation 6. Log-probabilities are means over
    an answer's tokens; the odds are p / (1 - p)."""
    log_odds = mean_chosen - mean_rejected - (log1mexp(mean_chosen) - log1mexp(mean_rejected))
    return -mean_chosen - beta * F.logsigmoid(log_odds)


def simpo(mean_chosen: Tensor, mean_rejected: Tensor, beta: float, gamma: float, smoothing: float = 0.0) -> Tensor:
    """-log s(beta (mean log p(chosen) - mean log p(rejected)) - gamma), (M,): Meng et al. 2024, equation 6."""
    return dpo(beta * (mean_chosen - mean_rejected) - gamma, 1.0, smoothing)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact near 0 and far from it (Maechler 2012); x is kept a rounding error below 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = torch.log(-torch.expm1(x))
    return torch.where(x > -0.693, near, torch.log1p(-x.exp()))
