"""The repetition penalty."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def repetition_penalty(logits: Tensor, history: Tensor, penalty: float) -> Tensor:
    """Make each token that occurs in a row's history less likely, once: divide its logit by the penalty if it is
    positive, and multiply it if it is negative.

    logits (B, V), history (B, T) of token ids, penalty > 1 -> (B, V)
    """
    chosen = logits.gather(-1, history)  # (B, T)
    lowered = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    return logits.scatter(-1, history, lowered)


def draw(pick: Random) -> tuple[Tensor, Tensor, float]:
    V, T = pick.randint(4, 5), pick.randint(3, 4)
    history = torch.randint(V, (2, T))
    history[:, -1] = history[:, 0]
    logits = torch.randn(2, V)
    return logits + logits.sign() * 0.1, history, pick.choice([1.5, 2.0])


EXERCISE = Exercise(
    chapter=9,
    answer=repetition_penalty,
    draw=draw,
    mistakes=(
        Mistake(
            "torch.where(chosen > 0, chosen / penalty, chosen * penalty)",
            "chosen / penalty",
            "negative logits are divided too, which makes their tokens likelier: multiply them",
        ),
        Mistake("chosen > 0", "chosen < 0", "the cases are exchanged: divide positive logits, multiply negative ones"),
        Mistake(
            "torch.where(chosen > 0, chosen / penalty, chosen * penalty)",
            "chosen - penalty",
            "the penalty is subtracted, as a presence penalty: divide or multiply",
        ),
        Mistake(
            "    chosen = logits.gather(-1, history)  # (B, T)\n"
            "    lowered = torch.where(chosen > 0, chosen / penalty, chosen * penalty)\n"
            "    return logits.scatter(-1, history, lowered)",
            "    logits = logits.clone()\n"
            "    for row, seen in zip(logits, history):\n"
            "        for token in seen:\n"
            "            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty\n"
            "    return logits",
            "a token that occurs twice is lowered twice: apply the penalty once per distinct token",
        ),
        Mistake(
            "return logits.scatter(-1, history, lowered)",
            "return torch.where(logits > 0, logits / penalty, logits * penalty)",
            "all tokens are lowered: lower those in the history",
        ),
        Mistake(
            "    chosen",
            "    history = history[:1].expand_as(history)\n    chosen",
            "the history of the first row is used for all rows: each row has its own",
        ),
        Mistake("chosen * penalty", "chosen", "negative logits stay as they are: multiply them by the penalty"),
        Mistake(
            "    chosen",
            "    history = history[:, -1:]\n    chosen",
            "only the last token of the history is lowered: lower all of its tokens",
        ),
        Mistake(
            "torch.where(chosen > 0, chosen / penalty, chosen * penalty)",
            "chosen * penalty",
            "positive logits are multiplied too, which makes their tokens likelier: divide them",
        ),
    ),
)
