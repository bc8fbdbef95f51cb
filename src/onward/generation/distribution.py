"""From logits to a token: the distribution that every path samples from, and the draw.

Shapes: B rows, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onward.generation.sampling import Sampling

COLDEST = 1e-6  # a lower temperature would only leave fp32, not change which token is taken


def next_token_distribution(logits: Tensor, samplings: Sequence[Sampling], banned: Tensor | None = None) -> Tensor:
    """The probabilities (B, V) of the next token, in fp32, from logits (B, V) and one Sampling per row.

    In this order: tokens of `banned` (V,) get no probability; temperature; top-k; top-p, the smallest set of
    likeliest tokens that holds at least that share (Holtzman et al. 2020). Ties at the border of top-k are all kept.
    """
    logits = logits.float()
    if banned is not None:
        logits = logits.masked_fill(banned, -math.inf)
    column = lambda values, dtype: torch.tensor(values, dtype=dtype, device=logits.device)[:, None]
    greedy = column([s.temperature < COLDEST for s in samplings], torch.bool)
    best = torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / column([max(s.temperature, COLDEST) for s in samplings], torch.float32)
    if any(s.top_k or s.top_p < 1 for s in samplings):
        ranked, order = logits.sort(-1, descending=True)
        k = column([min(s.top_k or logits.size(1), logits.size(1)) for s in samplings], torch.long)
        logits = logits.masked_fill(logits < ranked.gather(1, k - 1), -math.inf)
        ranked = ranked.masked_fill(ranked < ranked.gather(1, k - 1), -math.inf)
        probabilities = ranked.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        out = before >= column([s.top_p if s.top_p < 1 else math.inf for s in samplings], torch.float32)
        logits = logits.masked_fill(out.scatter(1, order, out), -math.inf)
    return torch.where(greedy, best, logits.softmax(-1))


GOLDEN = 0x9E3779B97F4A7C15  # 2 ** 64 over the golden ratio


def uniform(seeds: Tensor, index: Tensor, purpose: int) -> Tensor:
    """Numbers in [0, 1), fp64, each a pure function of a seed, a token index and a purpose, all int64.

    The counter-based generator SplitMix64 (Steele et al. 2014): so a draw does not depend on other rows or on how
    many were made before it.
    """

    def shift(x: Tensor, by: int) -> Tensor:  # logical: int64 would carry the sign along
        return (x >> by) & ((1 << (64 - by)) - 1)

    def scramble(x: Tensor) -> Tensor:
        x = (x ^ shift(x, 30)) * signed(0xBF58476D1CE4E5B9)
        x = (x ^ shift(x, 27)) * signed(0x94D049BB133111EB)
        return x ^ shift(x, 31)

    step = signed(GOLDEN)
    x = scramble(scramble(scramble(seeds + step) + index * step) + signed(purpose * GOLDEN % (1 << 64)))
    return shift(x, 11).double() * 2.0**-53


def signed(x: int) -> int:
    """The int64 with the same bits as a number below 2 ** 64."""
    return x - (1 << 64) if x >> 63 else x


def draw(probabilities: Tensor, at: Tensor) -> Tensor:
    """Token ids (B,): where the cumulated probabilities (B, V) pass `at` (B,), numbers in [0, 1)."""
    cumulated = probabilities.double().cumsum(-1)
    return torch.searchsorted(cumulated, at[:, None] * cumulated[:, -1:], right=True)[:, 0]
