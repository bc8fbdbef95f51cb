"""Causal attention."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output of causal attention: token t looks at itself and at all tokens before.

    q, k, v (B, H, T, E) -> (B, H, T, E), for B texts, H heads, T tokens and heads of width E
    """
    scores = q @ k.mT / q.shape[-1] ** 0.5  # (B, H, T, T)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return weights @ v


def draw(pick: Random) -> tuple[Tensor, ...]:
    shape = pick.randint(1, 2), pick.randint(1, 2), pick.randint(2, 3), pick.randint(2, 4)
    return torch.randn(shape), torch.randn(shape), torch.randn(shape)


EXERCISE = Exercise(
    chapter=4,
    answer=attention,
    draw=draw,
    mistakes=(
        Mistake(" / q.shape[-1] ** 0.5", "", "the scale is missing: divide the scores by √E"),
        Mistake("q.shape[-1] ** 0.5", "q.shape[-1]", "the scores are divided by E: divide them by its root"),
        Mistake("/ q.shape[-1]", "* q.shape[-1]", "the scores are multiplied by √E: divide them"),
        Mistake(
            "/ q.shape[-1]",
            "/ (q.shape[1] * q.shape[-1])",
            "the scores are divided by the root of the model's width: use that of one head, √E",
        ),
        Mistake(
            "triu(1)", "triu(0)", "the mask is off by one: a token sees itself too, so that the first row has a key"
        ),
        Mistake("triu(1)", "triu(2)", "the mask is off by one: each token sees the next, which it should predict"),
        Mistake("triu(1)", "tril(-1)", "the mask is transposed: the tokens before are hidden instead of those after"),
        Mistake(
            "scores.masked_fill(later, -torch.inf)", "scores", "the mask is missing: hide the scores of later tokens"
        ),
        Mistake(
            "-torch.inf).softmax(-1)",
            "0.0).softmax(-1)",
            "scores of later tokens are 0, which the softmax makes exp(0) = 1: set them to −∞",
        ),
        Mistake(
            "scores.masked_fill(later, -torch.inf).softmax(-1)",
            "scores.softmax(-1).masked_fill(later, 0.0)",
            "the mask comes after the softmax, so that the weights of a row sum to less than 1: mask the scores first",
        ),
        Mistake(
            "softmax(-1)",
            "softmax(-2)",
            "the softmax runs over the queries: apply it over the keys, the last axis, so that each row sums to 1",
        ),
        Mistake("q @ k.mT", "k @ q.mT", "queries and keys are exchanged: rows belong to queries, so write q @ k.mT"),
        Mistake("weights @ v", "weights.mT @ v", "the weights are transposed: write weights @ v"),
        Mistake("softmax(-1)", "softmax(1)", "the softmax runs over the heads: apply it over the keys, the last axis"),
        Mistake(
            "q.shape[-1] ** 0.5",
            "q.shape[-2] ** 0.5",
            "the scores are divided by the root of the number of tokens: use the width of a head, √E",
        ),
        Mistake(
            " / q.shape[-1] ** 0.5  # (B, H, T, T)\n"
            "    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)\n"
            "    weights = scores.masked_fill(later, -torch.inf).softmax(-1)",
            "\n    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)\n"
            "    weights = scores.masked_fill(later, -torch.inf).softmax(-1) / q.shape[-1] ** 0.5",
            "the weights are divided by √E: divide the scores, before the softmax",
        ),
        Mistake("weights @ v", "weights @ k", "keys are averaged: average the values, weights @ v"),
    ),
)
