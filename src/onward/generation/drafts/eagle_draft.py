"""Drafts by an EAGLE-3 decoder (Li et al. 2025, arXiv:2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onward.generation.drafts.estimates import Estimates, size
from onward.generation.drafts.hidden_draft import HiddenDraft
from onward.generation.drafts.proposal import Proposal
from onward.generation.drafts.times import expected_tokens
from onward.generation.request import Request
from onward.model.decoder import Decoder
from onward.model.eagle import EagleDecoder

OVERHEAD = 6_000_000  # overhead of a draft token, as the bytes of weights read in that time; an estimate


class EagleDraft(HiddenDraft):
    """A draft for speculative decoding that continues hidden states of `model` by the EAGLE-3 decoder `draft`. It
    proposes one of two numbers of tokens, or none where this saves no time (see `estimates`)."""

    def __init__(self, model: Decoder, draft: EagleDecoder) -> None:
        guess = OVERHEAD + size(draft.blocks) + size(draft.head)
        self.estimates = Estimates(model, guess)
        super().__init__(draft, self.estimates.lengths[-1])
        self.features, self.layers = draft.features, draft.features.layers

    def read(self, request: Request, start: int, hidden: Tensor) -> None:
        """Receive inputs of the model's blocks; see `ReadingDraft.read`."""
        super().read(request, start, self.features(hidden))

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """Return a proposal of one of two numbers of tokens, at most room[i], for requests[i]; empty proposals if none
        fits or saves enough time."""
        gain, rate = self.estimates.gain(requests)
        if not gain:
            for request in requests:  # otherwise their states would accumulate
                self.known.pop(request, None)
            return [Proposal() for _ in requests]
        count, time = len(requests), self.estimates.time
        best = max(self.estimates.lengths, key=lambda n: expected_tokens(rate, n) / time(n, count))
        return super().propose(requests, self.estimates.room([min(most, best) for most in room]))
