"""One step of beam search."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def beam_step(scores: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Continue b texts by one token each, and return the best b of the b · V continuations, best first: their scores
    (b,), the index of the text that each continues (b,), and its new token (b,). The score of a text is the sum of the
    log-probabilities of its tokens.

    scores (b,) of the texts so far, logprobs (b, V) of the next tokens
    """
    V = logprobs.shape[1]
    best, index = (scores[:, None] + logprobs).flatten().topk(len(scores))
    return best, index // V, index % V


def draw(pick: Random) -> tuple[Tensor, Tensor]:
    b, V = pick.randint(2, 3), pick.randint(4, 5)
    return -torch.rand(b), (2 * torch.randn(b, V)).log_softmax(-1)


EXERCISE = Exercise(
    chapter=9,
    answer=beam_step,
    draw=draw,
    mistakes=(
        Mistake(
            "    best, index = (scores[:, None] + logprobs).flatten().topk(len(scores))\n"
            "    return best, index // V, index % V",
            "    best, token = (scores[:, None] + logprobs).max(-1)\n    return best, torch.arange(len(scores)), token",
            "each text keeps its own best continuation: compare those of all texts with each other",
        ),
        Mistake("(scores[:, None] + logprobs)", "logprobs", "the scores so far are forgotten: add them"),
        Mistake(
            "scores[:, None] + logprobs",
            "scores[:, None] * logprobs.exp()",
            "log-probabilities and probabilities are mixed: add log-probabilities",
        ),
        Mistake(
            "index // V, index % V", "index % V, index // V", "text and token are exchanged: the text is index // V"
        ),
        Mistake(
            "V = logprobs.shape[1]",
            "V = logprobs.shape[0]",
            "the index is divided by the number of texts: divide it by V",
        ),
        Mistake(
            "return best, index // V, index % V",
            "return best, index // V, index",
            "the index among all b · V is returned as the token: it is index % V",
        ),
        Mistake(
            "return best, index // V",
            "return best - scores[index // V], index // V",
            "only the score of the new token is returned: return the sum",
        ),
        Mistake(
            "topk(len(scores))",
            "topk(len(scores), largest=False)",
            "the worst continuations are chosen: take the largest scores",
        ),
        Mistake(
            "scores[:, None] + logprobs",
            "scores[:, None] + logprobs.exp()",
            "probabilities are added to log-probabilities: add log-probabilities",
        ),
    ),
)
