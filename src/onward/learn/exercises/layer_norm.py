"""LayerNorm."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Subtract the mean of each vector, divide by the root of (its variance + eps), multiply by the weight and add the
    bias. The variance is the mean of the squared differences from the mean.

    x (B, T, D), weight (D,), bias (D,) -> (B, T, D)
    """
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.pow(2).mean(-1, keepdim=True)
    return centered / (variance + eps).sqrt() * weight + bias


def draw(pick: Random) -> tuple[Tensor, Tensor, Tensor, float]:
    D = pick.randint(2, 4)
    x = torch.randn(pick.randint(1, 2), 2, D) + 0.5
    return x, torch.rand(D) + 0.5, torch.rand(D), pick.choice([0.1, 0.2])


EXERCISE = Exercise(
    chapter=6,
    answer=layer_norm,
    draw=draw,
    mistakes=(
        Mistake(
            "centered.pow(2).mean(-1, keepdim=True)",
            "x.var(-1, keepdim=True)",
            "the variance divides by D − 1, as torch.var does by default: divide by D (correction=0)",
        ),
        Mistake("(variance + eps).sqrt()", "(variance.sqrt() + eps)", "eps is outside of the root: add it before"),
        Mistake("(variance + eps).sqrt()", "variance.sqrt()", "eps is missing: a constant vector becomes NaN"),
        Mistake(".sqrt()", "", "the root is missing: the vector is divided by its variance"),
        Mistake("return centered", "return x", "the vector that is divided still has its mean: subtract it"),
        Mistake(
            "centered = x - x.mean(-1, keepdim=True)\n    variance = centered.pow(2).mean(-1, keepdim=True)",
            "centered = x - x.mean(-2, keepdim=True)\n    variance = centered.pow(2).mean(-2, keepdim=True)",
            "mean and variance run over the tokens: take them over the last axis",
        ),
        Mistake(
            "/ (variance + eps).sqrt() * weight + bias",
            "/ (variance + eps).sqrt() * (weight + bias)",
            "the bias is multiplied: add it after the product with the weight",
        ),
        Mistake(" + bias", "", "the bias is missing: add it"),
        Mistake(" * weight", "", "the weight is missing: multiply by it"),
        Mistake(
            "mean(-1, keepdim=True)\n    variance = centered.pow(2).mean(-1, keepdim=True)",
            "mean()\n    variance = centered.pow(2).mean()",
            "one mean and variance for all vectors: take those of each, over the last axis",
        ),
        Mistake("* weight", "* (1 + weight)", "1 is added to the weight: multiply by the weight itself"),
    ),
)
