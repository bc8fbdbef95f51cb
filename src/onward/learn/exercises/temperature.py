"""Temperature, greedy decoding included."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def temperature(logits: Tensor, t: float) -> Tensor:
    """Return the probabilities of the next token at the temperature t. At 0, the token with the largest logit has the
    probability 1.

    logits (B, V) -> (B, V)
    """
    if t == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / t).softmax(-1)


def draw(pick: Random) -> tuple[Tensor, float]:
    return torch.randn(2, pick.randint(3, 5)), pick.choice([0.0, 0.5, 0.8, 1.5, 2.0])


EXERCISE = Exercise(
    chapter=9,
    answer=temperature,
    draw=draw,
    mistakes=(
        Mistake("logits / t", "logits * t", "the logits are multiplied: divide them, so that a large t flattens them"),
        Mistake(
            "(logits / t).softmax(-1)", "logits.softmax(-1) / t", "the probabilities are divided: divide the logits"
        ),
        Mistake(
            "(logits / t).softmax(-1)", "logits.softmax(-1)", "the temperature has no effect: divide the logits by t"
        ),
        Mistake(
            "(logits / t).softmax(-1)",
            "(logits.softmax(-1) / t).softmax(-1)",
            "the softmax is applied twice: divide the logits, and apply it once",
        ),
        Mistake("softmax(-1)", "softmax(0)", "the softmax runs over the rows: apply it over the vocabulary, axis −1"),
        Mistake(
            "if t == 0:", "if False:", "t = 0 divides by 0: give the token with the largest logit the probability 1"
        ),
        Mistake(
            "torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()",
            "logits.softmax(-1)",
            "t = 0 is treated as 1: give the token with the largest logit the probability 1",
        ),
        Mistake("(logits / t).softmax(-1)", "logits / t", "logits are returned: apply the softmax to them"),
    ),
)
