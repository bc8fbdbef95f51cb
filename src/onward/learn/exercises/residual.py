"""The residual distribution of speculative decoding."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution from which a token is drawn after a rejected guess: max(0, p − q), divided by its sum.

    p (B, V) of the large model, q (B, V) of the draft -> (B, V)
    """
    rest = (p - q).clamp(min=0)
    return rest / rest.sum(-1, keepdim=True)


def draw(pick: Random) -> tuple[Tensor, Tensor]:
    V = pick.randint(3, 5)
    return torch.randn(2, V).softmax(-1), torch.randn(2, V).softmax(-1)


EXERCISE = Exercise(
    chapter=11,
    answer=residual,
    draw=draw,
    mistakes=(
        Mistake("rest / rest.sum(-1, keepdim=True)", "rest", "the sum is below 1: divide by it"),
        Mistake(
            "(p - q)", "(q - p)", "the difference is reversed: where the draft guesses too rarely, p − q is positive"
        ),
        Mistake(
            "(p - q).clamp(min=0)", "(p - q).abs()", "this is the absolute difference: set negative differences to 0"
        ),
        Mistake("(p - q).clamp(min=0)", "p", "this is p itself: tokens that the draft guesses would come too often"),
        Mistake("(p - q).clamp(min=0)", "(p / q - 1).clamp(min=0)", "ratios are compared: use the difference p − q"),
        Mistake(
            "rest / rest.sum(-1, keepdim=True)", "rest.softmax(-1)", "a softmax makes zeros positive: divide by the sum"
        ),
        Mistake("sum(-1, keepdim=True)", "sum()", "one sum for all rows: divide each row by its own"),
        Mistake(
            "(p - q).clamp(min=0)", "torch.minimum(p, q)", "this is the accepted part, min(p, q): take max(0, p − q)"
        ),
        Mistake(
            "sum(-1, keepdim=True)", "amax(-1, keepdim=True)", "the largest difference becomes 1: divide by the sum"
        ),
        Mistake("(p - q).clamp(min=0)", "(p - q)", "negative differences stay, so that the sum is 0: set them to 0"),
    ),
)
