"""The loss of direct preference optimization."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """Return the mean DPO loss of N pairs of answers: −ln σ(beta · margin), where the margin is how much more strongly
    the model prefers the chosen answer than the reference does.

    chosen, rejected (N,): ln P of the answers by the model, summed over tokens; ref_...: the same by the reference
    -> ()
    """
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -torch.nn.functional.logsigmoid(beta * margin).mean()


def draw(pick: Random) -> tuple[object, ...]:
    N = pick.randint(2, 3)
    return *(-5 * torch.rand(N) - 1 for _ in range(4)), pick.choice([0.3, 0.5])


EXERCISE = Exercise(
    chapter=16,
    answer=dpo_loss,
    draw=draw,
    mistakes=(
        Mistake(
            "(beta * margin)",
            "(-beta * margin)",
            "the sign of the margin is wrong: the loss falls as the chosen answer gains",
        ),
        Mistake("return -torch", "return torch", "the sign of the loss is wrong: it is −ln σ"),
        Mistake(
            "(chosen - ref_chosen) - (rejected - ref_rejected)",
            "chosen - rejected",
            "the reference is missing: subtract its log-probabilities",
        ),
        Mistake(
            "(chosen - ref_chosen) - (rejected - ref_rejected)",
            "(chosen - ref_chosen) + (rejected - ref_rejected)",
            "the log-ratios are added: subtract that of the rejected answer",
        ),
        Mistake(
            "(chosen - ref_chosen) - (rejected - ref_rejected)",
            "(chosen - rejected) + (ref_chosen - ref_rejected)",
            "the reference is added: subtract its margin",
        ),
        Mistake(
            "(chosen - ref_chosen) - (rejected - ref_rejected)",
            "(chosen - ref_chosen)",
            "the rejected answer is missing: subtract its log-ratio",
        ),
        Mistake("beta * margin", "margin", "beta is missing: multiply the margin by it"),
        Mistake("beta * margin", "margin / beta", "the margin is divided by beta: multiply it"),
        Mistake("logsigmoid(beta * margin)", "sigmoid(beta * margin)", "the logarithm is missing: use logsigmoid"),
        Mistake(
            "logsigmoid(beta * margin).mean()",
            "logsigmoid(beta * margin.mean())",
            "margins are averaged before the logarithm: average the losses of the pairs",
        ),
        Mistake(".mean()", ".sum()", "the losses are summed: take their mean"),
        Mistake(
            "(chosen - ref_chosen) - (rejected - ref_rejected)",
            "chosen - rejected - ref_chosen - ref_rejected",
            "parentheses are missing: subtract ref_chosen − ref_rejected",
        ),
        Mistake(
            "-torch.nn.functional.logsigmoid(beta * margin).mean()",
            "((margin - 1 / (2 * beta)) ** 2).mean()",
            "this is the loss of IPO: use −ln σ(beta · margin)",
        ),
        Mistake(
            "logsigmoid(beta * margin)",
            "logsigmoid(beta * (chosen - ref_chosen) - (rejected - ref_rejected))",
            "beta multiplies only the first log-ratio: put the margin into parentheses",
        ),
    ),
)
