"""Speculative decoding: tokens that a draft proposes are verified together (Leviathan et al. 2023; Chen et al. 2023).

Rejection sampling gives exactly the distribution of the model; without proposals this is plain sampling.
Shapes: B requests, N rows of p (after each request's last token and each proposal), K proposed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.base.device import tensor_on
from onward.generation.drafts.proposal import Proposal
from onward.kernels.draws import draw, uniform

DRAW, ACCEPT, RESIDUAL, DRAFT = range(4)  # the purposes of random numbers, see `uniform`


def verify(p: Tensor, proposals: Sequence[Proposal], seeds: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Verify the draft tokens of each request (`proposals`) by rejection sampling. Returns three tensors (B,): the
    number of accepted draft tokens of each request, the token that follows these, and the row of p that this token is
    drawn from. Forces no sync with the device.

    `p` (N, V) are the model's distributions, request by request, after its last token and after each of its draft
    tokens. A draft token x is accepted with probability min(1, p(x) / q(x)), where q is the draft's distribution; the
    first refused draft token is replaced by a draw from max(p - q, 0), normalized. If all are accepted, one more token
    is drawn from p. `seeds` (B,), the seeds of the requests, and `index` (B,), the number of tokens of each answer,
    determine all draws.
    """
    lengths = tensor_on(p.device, [len(proposal.tokens) for proposal in proposals])
    first = torch.cumsum(lengths + 1, 0) - lengths - 1  # the row after a request's last token
    if not any(proposal.tokens for proposal in proposals):
        return lengths, draw(p, seeds, index, DRAW), first
    kept = accepted(p, proposals, first, seeds, index)
    row, index = first + kept, index + kept
    rest = p[row]
    rest = torch.stack([residual(p_row, proposal, k) for p_row, proposal, k in zip(rest, proposals, kept)])
    return kept, draw(rest, seeds, index, torch.where(kept == lengths, DRAW, RESIDUAL)), row


def accepted(p: Tensor, proposals: Sequence[Proposal], first: Tensor, seeds: Tensor, index: Tensor) -> Tensor:
    """Return the number of accepted draft tokens of each request, (B,). `first` (B,) is the index in p of each
    request's first row; the other arguments are those of `verify`."""
    width = max(len(proposal.tokens) for proposal in proposals)
    padded = [[*proposal.tokens, *[0] * (width - len(proposal.tokens))] for proposal in proposals]
    tokens, column = tensor_on(p.device, padded), torch.arange(width, device=p.device)
    valid = tensor_on(p.device, [[j < len(proposal.tokens) for j in range(width)] for proposal in proposals])
    rows = (first[:, None] + column).clamp(max=len(p) - 1)
    p_of = p[rows].gather(2, tokens[:, :, None])[:, :, 0].double()  # (B, K)
    q_of = torch.ones_like(p_of)
    for row, proposal in enumerate(proposals):
        if proposal.distributions is not None and (k := len(proposal.tokens)):
            q_of[row, :k] = proposal.distributions.to(p.device).gather(1, tokens[row, :k, None])[:, 0].double()
    at = uniform(seeds[:, None].expand_as(rows), index[:, None] + column, ACCEPT)
    return ((at * q_of < p_of) & valid).long().cumprod(1).sum(1)


def residual(p: Tensor, proposal: Proposal, kept: Tensor) -> Tensor:
    """Return the distribution (V,), not normalized, from which the token after `kept` accepted draft tokens of a
    request is drawn: max(p - q, 0) in place of a refused draft token, or p if all were accepted. `p` (V,) is the
    model's distribution at this token, q the draft's."""
    if not proposal.tokens:
        return p
    at = kept.clamp(max=len(proposal.tokens) - 1)[None]  # a 0-dimensional index would force a sync
    if proposal.distributions is None:
        q = torch.zeros_like(p).index_fill_(0, tensor_on(p.device, proposal.tokens)[at], 1)
    else:
        q = proposal.distributions.to(p.device)[at][0]
    rest = (p - q).clamp(min=0)
    refused = (kept < len(proposal.tokens)) & rest.any()  # rounding may leave nothing
    return torch.where(refused, rest, p)
