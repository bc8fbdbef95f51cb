"""Speculative decoding: the tokens that a draft proposes are compared with the tokens that the model draws.

The draw of a token depends only on its distribution, the seed and the index of the token. A draft token is accepted if
it equals the token that the model draws after the preceding draft tokens. The text is thus the same as with plain
decoding, at every temperature and with every draft (Daliri et al. 2024, drafter-invariant speculative decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onward.generation.drafts.proposal import Proposal
from onward.generation.request import Request, inverse_temperature, is_plain
from onward.kernels.draws import draw_by_kernel

DRAW = 0  # the purpose of the random numbers that draw tokens, see `kernels.draws.draw`


def places(requests: Sequence[Request], proposals: Sequence[Proposal]) -> list[tuple[Request, int]]:
    """Return, for each row of logits (after a request's last token and after each of its draft tokens), its request and
    the index in the answer of the token that is drawn from it."""
    return [(r, len(r.tokens) + j) for r, p in zip(requests, proposals) for j in range(1 + len(p.tokens))]


def draw_plain(logits: Tensor, allowed: Tensor | None, rows: Sequence[tuple[Request, int]]) -> list[int] | None:
    """Draw a token from each of the N rows of logits (N, V) by one kernel on a CPU; `rows` are as returned by `places`.
    A row that has no distribution gets -1. Returns None on other devices, if the distribution of a row depends on more
    than the temperature, or if a drawn token would end its answer too early."""
    if not all(map(is_plain, {request for request, _ in rows})):
        return None
    factors = [inverse_temperature(request.sampling.temperature) for request, _ in rows]
    seeds, index = [request.seed for request, _ in rows], [index for _, index in rows]
    drawn = draw_by_kernel(logits, allowed, factors, seeds, index)
    if drawn is None:
        return None
    tokens: list[int] = drawn.tolist()
    return None if any(ends_early(*row, token) for row, token in zip(rows, tokens)) else tokens


def ends_early(request: Request, index: int, token: int) -> bool:
    """Return whether the token drawn at an index of a plain request's answer would end the answer before
    `min_new_tokens`. If not, banning the stop tokens would not change the draw, which takes the token with the greatest
    p / e (see `kernels.draws.draw`).
    """
    return index < request.min_new_tokens and token in request.stop_token_ids


def verified(drawn: Sequence[int], proposals: Sequence[Proposal]) -> list[list[int]]:
    """Return the new tokens of each request, given the tokens drawn from each row of logits: its accepted draft tokens,
    and the one drawn after them."""
    result, row = list[list[int]](), 0
    for tokens in (proposal.tokens for proposal in proposals):
        new = list(drawn[row : row + 1 + len(tokens)])
        kept = next((j for j, (guess, token) in enumerate(zip(tokens, new)) if guess != token), len(tokens))
        result.append(new[: kept + 1])
        row += len(new)
    return result
