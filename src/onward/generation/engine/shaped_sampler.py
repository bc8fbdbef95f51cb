"""The sampler for requests whose distribution depends on more than the temperature: on processors, constraints or draft
tokens.

Shapes: B requests, N rows of logits (after each request's last token, and after each draft token), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onward.base.device import tensor_on
from onward.base.errors import UserError
from onward.generation.distribution import process_logits
from onward.generation.drafts.proposal import Proposal
from onward.generation.drafts.verify import DRAW, places, verified
from onward.generation.failures import NOTHING_ALLOWED, NotANumber
from onward.generation.history import NgramIndex, RequestHistory, TokenCounts
from onward.generation.request import Request
from onward.kernels.draws import draw


class ShapedSampler:
    """The sampler for requests with options besides the temperature, such as top_p: it computes their complete
    distributions (N, V), and verifies draft tokens.

    `allowed` (V,) is False for tokens that are never sampled; None: all may be.
    """

    def __init__(self, allowed: Tensor | None = None) -> None:
        self.allowed = allowed
        self.counts, self.ngrams = TokenCounts(), WeakKeyDictionary[Request, NgramIndex]()

    def sample(
        self, logits: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> tuple[list[list[int] | Exception], Tensor]:
        """Sample the next tokens of each request; arguments and results are those of `Sampler.sample`."""
        prefixes = [(i, p.tokens[:j]) for i, p in enumerate(proposals) for j in range(1 + len(p.tokens))]
        history = RequestHistory(requests, prefixes, self.counts, self.ngrams)
        errors: dict[int, Exception] = {}
        allowed = masks(requests, proposals, self.allowed, logits, errors)
        p = process_logits(logits, [requests[i].sampling for i, _ in prefixes], history, allowed, errors).softmax(-1)
        p = p.masked_fill(logits.isnan().any(-1, keepdim=True), torch.nan)  # bans may have replaced NaN
        device = torch.device("cpu") if p.device.type == "mps" else p.device  # fp64, of random numbers, is not on mps
        p, rows = p.to(device), places(requests, proposals)
        seeds, index = tensor_on(device, [[request.seed, index] for request, index in rows]).unbind(1)
        tokens = draw(p, seeds, index, DRAW)
        drawn, finite = torch.stack([tokens, p.isfinite().all(-1).long()]).tolist()
        result: list[list[int] | Exception] = []
        row = 0
        for new, proposal in zip(verified(drawn, proposals), proposals):
            failed = next((j for j in range(len(new)) if row + j in errors or not finite[row + j]), None)
            if failed != 0:  # where a later token fails, the next step fails at once
                result.append(new[:failed])
            elif row in errors:
                result.append(errors[row])
            else:
                result.append(NotANumber() if bool(logits[row].isnan().any()) else UserError(NOTHING_ALLOWED))
            row += 1 + len(proposal.tokens)
        if len(result) < len(drawn):
            tokens = torch.tensor([0 if isinstance(new, Exception) else new[-1] for new in result])
        return result, tokens.to(logits.device)


def masks(
    requests: Sequence[Request],
    proposals: Sequence[Proposal],
    allowed: Tensor | None,
    like: Tensor,
    errors: dict[int, Exception],
) -> Tensor | None:
    """Return a mask (N, V) of the tokens allowed in each row of logits or, if no request restricts its tokens,
    `allowed`, a mask (V,) for all rows (None: all are allowed); `like` is a tensor (..., V) on the device of the mask.

    The mask combines `allowed` with the constraint and `min_new_tokens` of each request, after its draft tokens
    (`proposals`). An exception of a constraint is stored in `errors` under the index of its row.
    """
    if all(r.constraint is None and len(r.tokens) >= r.min_new_tokens for r in requests):
        return allowed
    result: list[Tensor] = []
    for request, proposal in zip(requests, proposals):
        state = request.constraint and request.constraint.copy()
        for index, token in enumerate((*proposal.tokens, None), len(request.tokens)):
            mask = like.new_ones(like.size(-1), dtype=torch.bool) if allowed is None else allowed.clone()
            try:
                if state is not None:
                    mask &= state.allowed().to(mask.device)
                    if token is not None and not state.accept(token):
                        state = None  # this proposal has probability 0: later rows are not used
            except Exception as error:
                errors[len(result)], state = error, None
            if index < request.min_new_tokens:
                mask[list(request.stop_token_ids)] = False
            result.append(mask)
    return torch.stack(result)
