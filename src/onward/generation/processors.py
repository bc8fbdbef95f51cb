"""Logits processors: functions that change the logits before a token is sampled, one per sampling option.

Shapes: B rows, V vocabulary. Each processor takes logits (B, V) in fp32 and one value of its option per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onward.base.device import tensor_on

MIN_TEMPERATURE = 1e-6  # lower temperatures count as 0: logits divided by them could overflow fp32


def column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `values`, one per row of logits, as a tensor (B, 1) of `dtype` on the device of `like`."""
    return tensor_on(like.device, values, dtype)[:, None]


def penalize_repetition(logits: Tensor, penalty: Sequence[float], seen: Tensor) -> Tensor:
    """For tokens marked in `seen` (B, V), divide positive logits (B, V) by the `penalty` of their row, and multiply
    negative ones by it, as transformers does; CTRL (Keskar et al. 2019, section 4.1) divides all."""
    p = column(penalty, logits)
    return torch.where(seen, torch.where(logits > 0, logits / p, logits * p), logits)


def penalize_counts(logits: Tensor, frequency: Sequence[float], presence: Sequence[float], counts: Tensor) -> Tensor:
    """Subtract c * `frequency` from the logit of a token that was generated c times, and also `presence` if c > 0
    (OpenAI's API). Both penalties are given per row; `counts` (B, V) holds c."""
    return logits - counts * column(frequency, logits) - (counts > 0) * column(presence, logits)


def repeats(tokens: Sequence[int], size: int) -> set[int]:
    """Return the tokens that, appended to `tokens`, would repeat an n-gram of `size` tokens that `tokens` already
    contains; these tokens are then banned."""
    if not size or len(tokens) < size:
        return set()
    last = tuple(tokens[len(tokens) - size + 1 :])
    return {tokens[i + size - 1] for i in range(len(tokens) - size + 1) if tuple(tokens[i : i + size - 1]) == last}


def ban(logits: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Set the logits of banned tokens to -inf; `tokens` has a list of token ids for each row."""
    rows = [row for row, ids in enumerate(tokens) for _ in ids]
    logits = logits.clone()
    indices = tensor_on(logits.device, [rows, [i for ids in tokens for i in ids]], torch.long)
    return logits.index_put_(tuple(indices), logits.new_full((), -math.inf))


def force(logits: Tensor, token: Sequence[int | None]) -> Tensor:
    """Force one token per row: set its logit to 0 and all others to -inf. Rows for which `token` has None stay
    unchanged."""
    forced = tensor_on(logits.device, [-1 if t is None else t for t in token])[:, None]
    keep = (forced < 0) | (torch.arange(logits.size(1), device=logits.device) == forced)
    return torch.where((forced >= 0) & keep, 0.0, logits).masked_fill(~keep, -math.inf)


def apply_temperature(logits: Tensor, temperature: Sequence[float]) -> Tensor:
    """Divide the logits by the temperature of their row. Below MIN_TEMPERATURE, the likeliest token (the first of
    equals) gets probability 1."""
    greedy = column([t < MIN_TEMPERATURE for t in temperature], logits, torch.bool)
    top, best_token = logits.max(-1, keepdim=True)
    best = torch.full_like(logits, -math.inf).scatter_(1, best_token, torch.where(top > -math.inf, 0.0, top))
    return torch.where(greedy, best, logits / column([max(t, MIN_TEMPERATURE) for t in temperature], logits))


def keep_top_k(logits: Tensor, k: Sequence[int]) -> Tensor:
    """Keep the logits of each row's k likeliest tokens (0: all), and of tokens with the same logit as the k-th; set the
    others to -inf (Fan et al. 2018)."""
    size = logits.size(1)
    k = [min(value or size, size) for value in k]
    best = logits.topk(max((value for value in k if value < size), default=1)).values
    border = best.gather(1, column([min(value, best.size(1)) - 1 for value in k], logits, torch.long))
    return logits.masked_fill((logits < border) & column([value < size for value in k], logits, torch.bool), -math.inf)


def keep_top_p(logits: Tensor, p: Sequence[float]) -> Tensor:
    """Keep the logits of each row's smallest set of likeliest tokens whose total probability is at least the row's `p`;
    set the others to -inf (Holtzman et al. 2020)."""
    ranked, order = logits.sort(-1, descending=True)
    shares = ranked.softmax(-1)
    out = shares.cumsum(-1) - shares >= column([value if value < 1 else math.inf for value in p], logits)
    return logits.masked_fill(out.scatter(1, order, out), -math.inf)


def keep_min_p(logits: Tensor, share: Sequence[float]) -> Tensor:
    """Keep the logits of the tokens whose probability is at least the row's `share` times the probability of the row's
    likeliest token; set the logits of others to -inf (Nguyen et al. 2024)."""
    shares = logits.softmax(-1)
    return logits.masked_fill(shares < column(share, logits) * shares.amax(-1, keepdim=True), -math.inf)


def keep_typical(logits: Tensor, p: Sequence[float]) -> Tensor:
    """Keep the logits of the tokens whose negative log-probability is nearest to the entropy, until
    their total probability reaches the row's `p`; set the others to -inf (Meister et al. 2023)."""
    surprise = -logits.log_softmax(-1)
    shares = logits.softmax(-1)
    entropy = (shares * surprise).nansum(-1, keepdim=True)  # a token without probability adds nothing
    order = (surprise - entropy).abs().argsort(dim=-1, stable=True)
    ranked = shares.gather(1, order)
    out = ranked.cumsum(-1) - ranked >= column([value if value < 1 else math.inf for value in p], logits)
    return logits.masked_fill(out.scatter(1, order, out), -math.inf)
