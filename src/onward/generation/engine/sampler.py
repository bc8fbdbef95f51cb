"""The sampler: draws the next tokens of requests from logits.

Shapes: B requests, N rows of logits (after each request's last token, and after each draft token), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property

import torch
from torch import Tensor

from onward.generation.drafts.proposal import Proposal
from onward.generation.drafts.verify import places, verified
from onward.generation.engine.shaped_sampler import ShapedSampler
from onward.generation.processors import MIN_TEMPERATURE
from onward.generation.request import Request
from onward.generation.sampling import Sampling
from onward.kernels.draws import draw_by_kernel


class Sampler:
    """Samples the next tokens of an engine's requests, with one sync of the device per call.

    `allowed` (V,) is False for tokens that are never sampled; None: all may be.
    """

    def __init__(self, allowed: Tensor | None = None) -> None:
        self.allowed = allowed

    @cached_property
    def shaped(self) -> ShapedSampler:
        """The sampler for other options than the temperature, made when a request has one."""
        return ShapedSampler(self.allowed)

    def sample(
        self, logits: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> tuple[list[list[int] | Exception], Tensor]:
        """Sample the next tokens of each request: its accepted draft tokens and one more, or an exception if the
        request has no next token.

        `logits` (N, V) are, request by request, those after its last token and after each of its draft tokens
        (`proposals`). Also returns the last token of each request on the device, (B,). If the exception occurs after
        some accepted draft tokens, only these are returned, and the next step fails.
        """
        plain = self.sample_plain(logits, requests, proposals)
        return self.shaped.sample(logits, requests, proposals) if plain is None else plain

    def sample_plain(
        self, logits: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> tuple[list[list[int] | Exception], Tensor] | None:
        """Sample by one kernel on a CPU, if the temperature is the only option that changes the distribution of any
        row. Arguments and results are those of `sample`: the new tokens of each request, and the last ones as a tensor
        (B,).

        Returns None on other devices, with other options, and if a row has no distribution (all its logits are -inf, or
        one is NaN).
        """
        if not all(map(is_plain, requests)):
            return None
        rows = places(requests, proposals)
        factors = [inverse_temperature(request.sampling.temperature) for request, _ in rows]
        seeds, index = [request.seed for request, _ in rows], [index for _, index in rows]
        drawn = draw_by_kernel(logits, self.allowed, factors, seeds, index)
        if drawn is None:
            return None
        tokens = drawn.tolist()
        if min(tokens) < 0:
            return None
        new = verified(tokens, proposals)
        return new, drawn if len(new) == len(tokens) else torch.tensor([each[-1] for each in new])


SHAPING = [field.name for field in fields(Sampling) if field.name != "temperature"]
PLAIN = [getattr(Sampling(), name) for name in SHAPING]


def is_plain(request: Request) -> bool:
    return (
        request.constraint is None
        and len(request.tokens) >= request.min_new_tokens
        and [getattr(request.sampling, name) for name in SHAPING] == PLAIN
    )


def inverse_temperature(temperature: float) -> float:
    """Return 1 / temperature; 0 for a temperature of about 0, which selects the likeliest token."""
    return 0.0 if temperature < MIN_TEMPERATURE else 1 / temperature
