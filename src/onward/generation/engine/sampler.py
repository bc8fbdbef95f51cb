"""The sampler: draws the next tokens of requests from logits.

Shapes: B requests, N rows of logits (after each request's last token, and after each draft token), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from onward.generation.drafts.proposal import Proposal
from onward.generation.drafts.verify import ends_early
from onward.generation.request import Request, inverse_temperature, is_plain
from onward.kernels.draws import draw_by_kernel

if TYPE_CHECKING:
    from onward.generation.engine.shaped_sampler import ShapedSampler


class Sampler:
    """Samples the next tokens of an engine's requests, with one device sync per call.

    `allowed` (V,) is False for tokens that are never sampled; None: all may be.
    """

    def __init__(self, allowed: Tensor | None = None) -> None:
        self.allowed = allowed

    @cached_property
    def shaped(self) -> ShapedSampler:
        """The sampler for draft tokens and for options other than the temperature, created on first use."""
        from onward.generation.engine.shaped_sampler import ShapedSampler

        return ShapedSampler(self.allowed)

    def sample(
        self, logits: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> tuple[list[list[int] | Exception], Tensor]:
        """Sample the next tokens of each request: its accepted draft tokens and one more, or an exception if the
        request has no next token.

        `logits` (N, V) has, for each request in turn, a row after its last token and one after each of its draft tokens
        (`proposals`). Also returns the last token of each request as a tensor (B,) on the device. If the exception
        occurs after some accepted draft tokens, only these are returned, and the next step fails.
        """
        plain = self.sample_plain(logits, requests, proposals)
        return self.shaped.sample(logits, requests, proposals) if plain is None else plain

    def sample_plain(
        self, logits: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> tuple[list[list[int] | Exception], Tensor] | None:
        """Sample by one kernel on a CPU, if the temperature is the only option that changes the distribution of any
        row. Arguments and results are those of `sample`.

        Returns None on other devices, with other options or draft tokens, if a row has no distribution (all its logits
        are -inf, or one is NaN), or if a drawn token would end its answer too early.
        """
        if any(proposal.tokens for proposal in proposals) or not all(map(is_plain, requests)):
            return None
        factors = [inverse_temperature(request.sampling.temperature) for request in requests]
        seeds, index = [r.seed for r in requests], [len(r.tokens) for r in requests]
        drawn = draw_by_kernel(logits, self.allowed, factors, seeds, index)
        if drawn is None:
            return None
        tokens = drawn.tolist()
        if min(tokens) < 0 or any(r.min_new_tokens and ends_early(r, *at) for r, *at in zip(requests, index, tokens)):
            return None
        return [[token] for token in tokens], drawn
