"""The advantages of GRPO."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def advantages(rewards: Tensor, eps: float) -> Tensor:
    """Return the advantages of GRPO: each reward minus the mean of its group, divided by (the group's standard
    deviation + eps). A group is the answers to one prompt. The deviation is that of torch.std, which divides by G − 1.

    rewards (N, G) for N prompts with G answers each -> (N, G)
    """
    mean, deviation = rewards.mean(-1, keepdim=True), rewards.std(-1, keepdim=True)
    return (rewards - mean) / (deviation + eps)


def draw(pick: Random) -> tuple[Tensor, float]:
    rewards = torch.randn(2, pick.randint(3, 4)) + torch.tensor([[0.0], [2.0]])
    return rewards, pick.choice([0.1, 0.2])


EXERCISE = Exercise(
    chapter=16,
    answer=advantages,
    draw=draw,
    mistakes=(
        Mistake(
            "rewards.mean(-1, keepdim=True), rewards.std(-1, keepdim=True)",
            "rewards.mean(), rewards.std()",
            "one mean and deviation for all prompts: take those of each group, over the last axis",
        ),
        Mistake(
            "rewards.mean(-1, keepdim=True), rewards.std(-1, keepdim=True)",
            "rewards.mean(0), rewards.std(0)",
            "answers to different prompts are compared: a group is a row",
        ),
        Mistake(
            "rewards.std(-1, keepdim=True)",
            "rewards.std(-1, keepdim=True, correction=0)",
            "the deviation divides by G: divide by G − 1, as torch.std does by default",
        ),
        Mistake("rewards.std(", "rewards.var(", "rewards are divided by the variance: use the standard deviation"),
        Mistake(" / (deviation + eps)", "", "the deviation is missing (as in Dr. GRPO): divide by it"),
        Mistake(
            "(rewards - mean)", "rewards", "the mean is not subtracted: every answer with a reward would be reinforced"
        ),
        Mistake(
            "(rewards - mean)",
            "(mean - rewards)",
            "the sign is wrong: a reward above the mean has a positive advantage",
        ),
        Mistake("(deviation + eps)", "deviation", "eps is missing: a group of equal rewards gives 0 / 0"),
        Mistake(
            "(deviation + eps)", "(deviation**2 + eps).sqrt()", "eps is inside of the root: add it to the deviation"
        ),
        Mistake(
            "rewards.std(-1, keepdim=True)",
            "rewards.std()",
            "one deviation for all prompts: take that of each group, over the last axis",
        ),
        Mistake(
            "(rewards - mean) /", "rewards - mean /", "only the mean is divided: put the difference into parentheses"
        ),
    ),
)
