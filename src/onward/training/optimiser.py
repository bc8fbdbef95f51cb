"""AdamW and the learning rate's course."""

import math

import torch
from torch import nn


def adamw(model: nn.Module, learning_rate: float, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) that decays matrices only, in torch's fused form."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def learning_rate_share(step: int, steps: int, warmup: float, final: float) -> float:
    """The share of the highest learning rate at a step (0 to steps - 1): linear warm-up, then a cosine to `final`.

    The last step has exactly `final`.
    """
    rise = min(int(warmup * steps), steps - 1)
    if step < rise:
        return (step + 1) / (rise + 1)
    progress = (step - rise) / max(1, steps - 1 - rise)
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
