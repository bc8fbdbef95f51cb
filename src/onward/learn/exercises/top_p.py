"""Top-p, nucleus sampling."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of the likeliest tokens whose probabilities sum to at least p, and set the logits of all
    other tokens to −∞. At least one token stays.

    logits (B, V) -> (B, V)
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    sums = ordered.softmax(-1).cumsum(-1)
    before = sums - ordered.softmax(-1)  # sum over the likelier tokens
    drop = before >= p
    drop = torch.zeros_like(drop).scatter(-1, order, drop)
    return logits.masked_fill(drop, -torch.inf)


def draw(pick: Random) -> tuple[Tensor, float]:
    """A case in which no sum is near p."""
    p = pick.choice([0.3, 0.6, 0.8, 0.9])
    while True:
        logits = 1.5 * torch.randn(2, pick.randint(4, 5))
        sums = logits.softmax(-1).sort(descending=True).values.cumsum(-1)
        if (sums - p).abs().min() > 0.01:
            return logits, p


EXERCISE = Exercise(
    chapter=9,
    answer=top_p,
    draw=draw,
    mistakes=(
        Mistake(
            "before >= p",
            "sums > p",
            "the token that reaches p is dropped: compare the sum before a token, or shift the mask by one",
        ),
        Mistake(
            "before >= p",
            "(sums > p) & (torch.arange(sums.shape[-1]) > 0)",
            "the token that reaches p is dropped unless it is the likeliest: shift the mask by one",
        ),
        Mistake(
            "    drop = torch.zeros_like(drop).scatter(-1, order, drop)\n",
            "",
            "the mask is in the sorted order: scatter it back to the order of token ids",
        ),
        Mistake(
            "torch.zeros_like(drop).scatter(-1, order, drop)",
            "drop.gather(-1, order)",
            "gather with the order of the sort sorts the mask once more: use scatter, or gather with order.argsort(-1)",
        ),
        Mistake(
            "logits.masked_fill(drop, -torch.inf)",
            "ordered.masked_fill(before >= p, -torch.inf)",
            "the logits are returned in the sorted order: scatter the mask back, and apply it to the logits",
        ),
        Mistake(
            "descending=True",
            "descending=False",
            "the sum begins at the least likely tokens: sort with descending=True",
        ),
        Mistake(
            "ordered.softmax(-1).cumsum(-1)\n    before = sums - ordered.softmax(-1)  # sum over the likelier tokens",
            "ordered.cumsum(-1)\n    before = sums - ordered",
            "logits are summed: apply the softmax before the sum",
        ),
        Mistake(
            "before >= p",
            "before - ordered.softmax(-1).roll(1, -1) >= p",
            "one token too many is kept: stop at the token that reaches p",
        ),
        Mistake(
            "before >= p", "ordered.softmax(-1) < 1 - p", "single probabilities are compared with p: compare their sum"
        ),
        Mistake(
            "scatter(-1, order, drop)\n",
            "scatter(-1, order, drop[:1].expand_as(drop))\n",
            "all rows are cut like the first: each row has its own mask",
        ),
        Mistake("-torch.inf", "0.0", "dropped logits are 0, which the softmax makes exp(0) = 1: set them to −∞"),
        Mistake(
            "return logits.masked_fill(drop, -torch.inf)",
            "return logits.masked_fill(drop, -torch.inf).softmax(-1)",
            "probabilities are returned: return logits, without a softmax",
        ),
        Mistake(
            "descending=True)\n    sums = ordered.softmax(-1).cumsum(-1)\n"
            "    before = sums - ordered.softmax(-1)  # sum over the likelier tokens\n    drop = before >= p",
            "descending=False)\n    sums = ordered.softmax(-1).cumsum(-1)\n    drop = sums <= p",
            "the least likely tokens are dropped until their sum exceeds p: in ascending order, compare with 1 − p",
        ),
        Mistake(
            "logits.sort(dim=-1, descending=True)",
            "logits, torch.arange(logits.shape[-1]).expand_as(logits)",
            "tokens are not sorted: sum the probabilities from the likeliest token on",
        ),
        Mistake(
            "before >= p", "before >= 1 - p", "the sum is compared with 1 − p: in descending order, compare it with p"
        ),
    ),
)
