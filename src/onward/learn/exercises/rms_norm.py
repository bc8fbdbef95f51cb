"""RMSNorm."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each vector by the root of (the mean of its squares + eps), and multiply it by the weight.

    x (B, T, D), weight (D,) -> (B, T, D)
    """
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return x / (mean_square + eps).sqrt() * weight


def draw(pick: Random) -> tuple[Tensor, Tensor, float]:
    D = pick.randint(2, 4)
    return torch.randn(pick.randint(1, 2), 2, D) + 0.5, torch.rand(D) + 0.5, pick.choice([0.1, 0.2])


EXERCISE = Exercise(
    chapter=6,
    answer=rms_norm,
    draw=draw,
    mistakes=(
        Mistake(
            "(mean_square + eps).sqrt()", "(mean_square.sqrt() + eps)", "eps is outside of the root: add it before"
        ),
        Mistake("(mean_square + eps).sqrt()", "mean_square.sqrt()", "eps is missing: a vector of zeros becomes NaN"),
        Mistake(".sqrt()", "", "the root is missing: the vector is divided by its mean square"),
        Mistake("mean(-1, keepdim=True)", "sum(-1, keepdim=True)", "squares are summed: take their mean"),
        Mistake(
            "mean(-1, keepdim=True)",
            "mean(-2, keepdim=True)",
            "the mean runs over the tokens: take it over the last axis",
        ),
        Mistake(
            "mean(-1, keepdim=True)", "mean()", "one mean for all vectors: take the mean of each, over the last axis"
        ),
        Mistake(
            "mean_square = x.pow(2)",
            "x = x - x.mean(-1, keepdim=True)\n    mean_square = x.pow(2)",
            "the mean is subtracted, as in LayerNorm: RMSNorm keeps it",
        ),
        Mistake("* weight", "* (1 + weight)", "1 is added to the weight, as in Gemma: multiply by the weight itself"),
        Mistake(" * weight", "", "the weight is missing: multiply by it"),
        Mistake(
            "x.pow(2).mean(-1, keepdim=True)",
            "x.var(-1, keepdim=True, correction=0)",
            "the variance is used, in which the mean is subtracted: use the mean of the squares",
        ),
        Mistake(
            "x.pow(2).mean(-1, keepdim=True)",
            "x.var(-1, keepdim=True)",
            "x.std or x.var is used, which subtracts the mean and divides by D − 1: use the mean of the squares",
        ),
        Mistake(
            "x.pow(2).mean(-1, keepdim=True)",
            "x.abs().mean(-1, keepdim=True).pow(2)",
            "absolute values are averaged: average the squares",
        ),
        Mistake("* weight", "+ weight", "the weight is added: multiply by it"),
    ),
)
