"""Top-k."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def top_k(logits: Tensor, k: int) -> Tensor:
    """Set all logits but the k largest of each row to −∞. k may exceed V, and no two logits are equal.

    logits (B, V) -> (B, V)
    """
    k = min(k, logits.shape[-1])
    least = logits.topk(k, dim=-1).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < least, -torch.inf)


def draw(pick: Random) -> tuple[Tensor, int]:
    V = pick.randint(3, 6)
    return torch.randn(2, V) + torch.tensor([[0.0], [1.0]]), pick.randint(1, V + 1)


EXERCISE = Exercise(
    chapter=9,
    answer=top_k,
    draw=draw,
    mistakes=(
        Mistake(
            "logits < least", "logits <= least", "off by one: the k-th largest logit is dropped, use < instead of <="
        ),
        Mistake("min(k, ", "min(k + 1, ", "off by one: k + 1 tokens are kept"),
        Mistake(
            "logits.topk(k, dim=-1)",
            "logits.topk(k, dim=-1, largest=False)",
            "the threshold comes from the k smallest logits: use the largest",
        ),
        Mistake("logits < least", "logits > least", "the largest logits are dropped: drop those below the threshold"),
        Mistake(
            ".values[:, -1:]  # (B, 1)",
            ".values[:, -1:].min()",
            "one threshold for all rows: each row has its own k-th largest logit",
        ),
        Mistake(
            ".values[:, -1:]", ".values[:, :1]", "the threshold is the largest logit: take the k-th, values[:, -1:]"
        ),
        Mistake("-torch.inf", "0.0", "dropped logits are 0, which the softmax makes exp(0) = 1: set them to −∞"),
        Mistake(
            "return logits.masked_fill(logits < least, -torch.inf)",
            "return logits.masked_fill(logits < least, -torch.inf).softmax(-1)",
            "probabilities are returned: return logits, without a softmax",
        ),
        Mistake(
            "logits.topk(k, dim=-1).values[:, -1:]",
            "logits.flatten().topk(k).values[-1]",
            "k tokens of all rows together are kept: keep k of each row",
        ),
        Mistake(
            "return logits.masked_fill(logits < least, -torch.inf)",
            "return logits.softmax(-1).masked_fill(logits < least, 0.0)",
            "probabilities are returned, which no longer sum to 1: return logits, the dropped ones set to −∞",
        ),
    ),
)
