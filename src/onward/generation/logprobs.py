"""Log-probabilities of sampled tokens.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenLogprob:
    """The model's log-probability of a token, in nats, before temperature, penalties and bans, and those of the
    likeliest tokens at its position."""

    token: int
    logprob: float
    alternatives: list[tuple[int, float]]  # the most likely tokens and their log-probabilities


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Return the log-probability of each of the `tokens`, from the logits (T, V) that predict them, with the `count`
    likeliest tokens at its position."""
    log_p = logits.float().log_softmax(-1)
    top = log_p.topk(min(count, log_p.size(1)))
    pairs = [list(zip(ids, values)) for ids, values in zip(top.indices.tolist(), top.values.tolist())]
    return [TokenLogprob(t, float(row[t]), best) for t, row, best in zip(tokens, log_p, pairs)]
