"""The loss of a decoder."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def next_token_loss(logits: Tensor, tokens: Tensor, pad: int) -> Tensor:
    """Return the mean cross-entropy of the next tokens, in nats. The logits at position t predict the token at t + 1,
    and predictions of the token `pad` do not count.

    logits (B, T, V), tokens (B, T) -> ()
    """
    targets = tokens[:, 1:]  # (B, T - 1)
    logprobs = logits[:, :-1].log_softmax(-1)
    losses = -logprobs.gather(-1, targets[..., None])[..., 0]
    return losses[targets != pad].mean()


def draw(pick: Random) -> tuple[Tensor, Tensor, int]:
    B, T, V = 2, pick.randint(3, 4), 4
    tokens = torch.randint(1, V, (B, T))
    tokens[0, -pick.randint(1, 2) :] = 0
    return 2 * torch.randn(B, T, V), tokens, 0


EXERCISE = Exercise(
    chapter=7,
    answer=next_token_loss,
    draw=draw,
    mistakes=(
        Mistake(
            "tokens[:, 1:]  # (B, T - 1)",
            "tokens[:, :-1]",
            "the targets are not shifted: the target of a token is the next one, tokens[:, 1:]",
        ),
        Mistake(
            "targets = tokens[:, 1:]  # (B, T - 1)\n    logprobs = logits[:, :-1].log_softmax(-1)",
            "targets = tokens\n    logprobs = logits.log_softmax(-1)",
            "nothing is shifted: compare logits[:, :-1] with tokens[:, 1:]",
        ),
        Mistake(
            "targets = tokens[:, 1:]  # (B, T - 1)\n    logprobs = logits[:, :-1]",
            "targets = tokens[:, :-1]\n    logprobs = logits[:, 1:]",
            "the shift goes the wrong way: compare logits[:, :-1] with tokens[:, 1:]",
        ),
        Mistake("losses[targets != pad].mean()", "losses.mean()", "padding counts: leave out targets that are pad"),
        Mistake(
            "losses[targets != pad].mean()",
            "losses[targets != pad].sum() / targets.numel()",
            "padding counts in the divisor: divide by the number of targets that are not pad",
        ),
        Mistake(
            "losses[targets != pad].mean()",
            "((losses * (targets != pad)).sum(1) / (targets != pad).sum(1)).nanmean()",
            "rows are averaged first, so that tokens of short texts count more: divide the sum by the number of tokens",
        ),
        Mistake(
            "losses[targets != pad]",
            "losses[tokens[:, :-1] != pad]",
            "inputs that are pad are left out, and targets that are pad count: look at the targets",
        ),
        Mistake("].mean()", "].sum()", "the losses are summed: take their mean"),
        Mistake(
            "log_softmax(-1)",
            "log_softmax(1)",
            "the softmax runs over positions: apply it over the vocabulary, axis −1",
        ),
        Mistake(
            "log_softmax(-1)", "log_softmax(0)", "the softmax runs over texts: apply it over the vocabulary, axis −1"
        ),
        Mistake(
            "log_softmax(-1)",
            "softmax(-1).log_softmax(-1)",
            "the softmax is applied twice: cross_entropy and log_softmax expect logits",
        ),
        Mistake("log_softmax(-1)", "softmax(-1)", "the logarithm is missing: use log_softmax"),
        Mistake("= -logprobs", "= logprobs", "the sign is missing: the loss is −ln P"),
        Mistake(
            "logits[:, :-1].log_softmax(-1)",
            "logits[:, :-1].reshape(len(logits), logits.shape[-1], -1).log_softmax(1).mT",
            "the logits are reshaped to (B, V, T), which mixes tokens and vocabulary: transpose, or flatten B and T",
        ),
        Mistake(
            "losses[targets != pad].mean()",
            "losses[targets != pad].sum() / len(tokens)",
            "the sum is divided by the number of texts: divide it by the number of tokens",
        ),
        Mistake("targets != pad", "targets == pad", "only padding counts: keep the targets that are not pad"),
        Mistake("].mean()", "].mean().exp()", "the perplexity is returned: return the loss, without exp"),
    ),
)
