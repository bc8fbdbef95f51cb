"""The router of a mixture of experts."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def route(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Choose the k experts with the largest scores for each token, as Mixtral does, best first. Their weights are a
    softmax over the chosen scores.

    scores (N, X) for N tokens and X experts -> weights (N, k), experts (N, k)
    """
    chosen, experts = scores.topk(k, dim=-1)
    return chosen.softmax(-1), experts


def draw(pick: Random) -> tuple[Tensor, int]:
    return torch.randn(2, pick.randint(4, 5)), pick.randint(2, 3)


EXERCISE = Exercise(
    chapter=12,
    answer=route,
    draw=draw,
    mistakes=(
        Mistake(
            "chosen.softmax(-1), experts",
            "scores.softmax(-1).gather(-1, experts), experts",
            "the softmax runs over all experts, so that the weights sum to less than 1: apply it to the chosen scores",
        ),
        Mistake(
            "chosen.softmax(-1)", "chosen.sigmoid()", "the weights are sigmoids: apply a softmax over the chosen scores"
        ),
        Mistake("chosen.softmax(-1)", "chosen", "scores are returned as weights: apply a softmax over them"),
        Mistake(
            "chosen.softmax(-1)", "chosen.softmax(0)", "the softmax runs over tokens: apply it over experts, axis −1"
        ),
        Mistake("dim=-1)", "dim=-1, largest=False)", "the worst experts are chosen: take the largest scores"),
        Mistake(
            "return chosen.softmax(-1)",
            "return torch.ones_like(chosen) / k",
            "all chosen experts get the same weight: use their scores",
        ),
        Mistake(
            "chosen.softmax(-1)",
            "chosen.sigmoid() / chosen.sigmoid().sum(-1, keepdim=True)",
            "the weights are sigmoids divided by their sum, as in DeepSeek-V3: apply a softmax over the chosen scores",
        ),
        Mistake(
            "chosen.softmax(-1), experts",
            "experts, chosen.softmax(-1)",
            "weights and experts are exchanged: return the weights first",
        ),
        Mistake(
            "chosen.softmax(-1)",
            "chosen / chosen.sum(-1, keepdim=True)",
            "scores are divided by their sum: apply a softmax over them",
        ),
        Mistake(
            "return chosen.softmax(-1), experts",
            "return chosen.softmax(-1).flip(-1), experts.flip(-1)",
            "the best expert comes last: return the experts best first",
        ),
    ),
)
