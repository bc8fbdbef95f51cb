"""Perplexity of a text that is read in batches."""

import math
from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def perplexity(batches: list[Tensor]) -> float:
    """Return the perplexity of a text: the exponential of the mean of −ln P over all of its tokens.

    batches: tensors (n,) of different lengths n with ln P of each token, in nats
    """
    total = sum(batch.sum().item() for batch in batches)
    count = sum(len(batch) for batch in batches)
    return math.exp(-total / count)


def draw(pick: Random) -> tuple[list[Tensor]]:
    lengths = pick.sample(range(1, 6), pick.randint(2, 3))
    return ([-torch.rand(n) * 4 * (i + 1) - 0.1 for i, n in enumerate(lengths)],)


EXERCISE = Exercise(
    chapter=1,
    answer=perplexity,
    draw=draw,
    mistakes=(
        Mistake(
            "math.exp(-total / count)",
            "sum(math.exp(-batch.mean().item()) for batch in batches) / len(batches)",
            "the perplexities of batches are averaged: average −ln P over all tokens, and take the exponential last",
        ),
        Mistake(
            "-total / count",
            "-sum(batch.mean().item() for batch in batches) / len(batches)",
            "the means of the batches are averaged, so that tokens of short batches count more: divide the sum of all "
            "tokens by their number",
        ),
        Mistake("math.exp(-total / count)", "math.exp(total / count)", "the sign is missing: ln P is negative"),
        Mistake("math.exp(-", "2 ** (-", "2 is the base, but the logarithms are natural: use math.exp"),
        Mistake("math.exp(-total / count)", "-total / count", "the loss is returned: take its exponential"),
        Mistake("-total / count", "-total", "the sum is not divided: divide it by the number of tokens"),
        Mistake(
            "-total / count",
            "-total / len(batches)",
            "the sum is divided by the number of batches: divide it by that of tokens",
        ),
        Mistake(
            "math.exp(-total / count)",
            "count / sum(batch.exp().sum().item() for batch in batches)",
            "probabilities are averaged: average their logarithms",
        ),
        Mistake(
            "-total / count",
            "-total / (count - 1)",
            "the sum is divided by one less than the number of tokens: divide it by their number",
        ),
    ),
)
