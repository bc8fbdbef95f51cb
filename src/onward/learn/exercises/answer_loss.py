"""The loss of supervised fine-tuning."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def answer_loss(logits: Tensor, tokens: Tensor, prompt_length: int) -> Tensor:
    """Return the mean cross-entropy of the tokens of an answer, in nats. The first `prompt_length` tokens are the
    prompt, which is not trained; all others are the answer, whose first token counts too.

    logits (T, V), tokens (T,), 1 <= prompt_length < T -> ()
    """
    targets = tokens[prompt_length:]
    logprobs = logits[prompt_length - 1 : -1].log_softmax(-1)
    return -logprobs.gather(-1, targets[:, None]).mean()


def draw(pick: Random) -> tuple[Tensor, Tensor, int]:
    T, V = pick.randint(4, 5), 4
    return 2 * torch.randn(T, V), torch.randint(V, (T,)), pick.randint(2, T - 2)


EXERCISE = Exercise(
    chapter=16,
    answer=answer_loss,
    draw=draw,
    mistakes=(
        Mistake(
            "tokens[prompt_length:]\n    logprobs = logits[prompt_length - 1 : -1]",
            "tokens[1:]\n    logprobs = logits[:-1]",
            "the prompt is trained too: leave out its tokens",
        ),
        Mistake(
            "tokens[prompt_length:]\n    logprobs = logits[prompt_length - 1 : -1]",
            "tokens[prompt_length + 1 :]\n    logprobs = logits[prompt_length:-1]",
            "the first token of the answer does not count: the last token of the prompt predicts it",
        ),
        Mistake(
            "logits[prompt_length - 1 : -1]",
            "logits[prompt_length:]",
            "targets are not shifted: the logits at position t predict the token at t + 1",
        ),
        Mistake(
            "tokens[prompt_length:]\n    logprobs = logits[prompt_length - 1 : -1]",
            "tokens[prompt_length - 1 :]\n    logprobs = logits[prompt_length - 2 : -1]",
            "the last token of the prompt counts: begin with the first of the answer",
        ),
        Mistake(
            ").mean()",
            ").sum() / (len(tokens) - 1)",
            "the sum is divided by the length of the text: divide it by that of the answer",
        ),
        Mistake(").mean()", ").sum()", "the losses are summed: take their mean"),
        Mistake("-logprobs.gather", "logprobs.gather", "the sign is missing: the loss is −ln P"),
        Mistake("log_softmax(-1)", "softmax(-1)", "the logarithm is missing: use log_softmax"),
        Mistake(
            "log_softmax(-1)",
            "log_softmax(0)",
            "the softmax runs over positions: apply it over the vocabulary, axis −1",
        ),
        Mistake(
            "log_softmax(-1)",
            "softmax(-1).log_softmax(-1)",
            "the softmax is applied twice: cross_entropy and log_softmax expect logits",
        ),
    ),
)
