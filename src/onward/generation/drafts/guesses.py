"""Draft tokens of drafts that compute logits, drawn in the same way as the model's own tokens.

Shapes: B requests, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.generation.distribution import process_logits
from onward.generation.drafts.verify import DRAW, draw_plain
from onward.generation.history import NgramIndex, RequestHistory, TokenCounts
from onward.generation.request import Request
from onward.kernels.draws import draw


class Guesses:
    """Draws draft tokens from the logits of a draft for a model with `vocab_size` tokens, with the sampling options and
    the random numbers of the requests."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.counts, self.ngrams = TokenCounts(), WeakKeyDictionary[Request, NgramIndex]()

    def draw(self, logits: Tensor, requests: Sequence[Request], proposed: Sequence[Sequence[int]]) -> list[int]:
        """Return a draft token for each request; -1 if the draft has no distribution. `logits` (B, V) are the draft's
        logits after the tokens proposed so far for each request (`proposed`)."""
        logits = logits[:, : self.vocab_size]  # the draft's vocabulary may be padded to another size
        logits = F.pad(logits, (0, self.vocab_size - logits.size(1)), value=-math.inf)
        rows = [(request, len(request.tokens) + len(tokens)) for request, tokens in zip(requests, proposed)]
        drawn = draw_plain(logits, None, rows)
        if drawn is not None:
            return drawn
        history = RequestHistory(requests, list(enumerate(proposed)), self.counts, self.ngrams)
        errors: dict[int, Exception] = {}  # a processor that fails here fails again when proposals are verified
        p = process_logits(logits, [r.sampling for r in requests], history, None, errors).softmax(-1).cpu()
        seeds, index = torch.tensor([[request.seed, index] for request, index in rows]).unbind(1)
        return draw(p, seeds, index, DRAW).where(p.isfinite().all(-1), -1).tolist()
