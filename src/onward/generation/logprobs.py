"""Log-probabilities of sampled tokens.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenLogprob:
    """The model's log-probability of a token, before temperature, penalties and bans, in nats."""

    token: int
    logprob: float
    alternatives: list[tuple[int, float]]  # the likeliest tokens and their log-probabilities


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Return the log-probability of each token, from logits (T, V), with the `count` likeliest alternatives."""
    log_p = logits.float().log_softmax(-1)
    top = log_p.topk(min(count, log_p.size(1)))
    pairs = [list(zip(ids, values)) for ids, values in zip(top.indices.tolist(), top.values.tolist())]
    return [TokenLogprob(t, float(row[t]), best) for t, row, best in zip(tokens, log_p, pairs)]
