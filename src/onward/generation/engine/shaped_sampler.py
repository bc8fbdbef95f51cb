"""The sampler for requests with draft tokens, or whose distribution depends on more than the temperature.

Shapes: B requests, N rows of logits (after each request's last token, and after each draft token), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onward.base.device import tensor_on
from onward.base.errors import UserError
from onward.generation.distribution import process_logits
from onward.generation.drafts.proposal import Proposal
from onward.generation.drafts.verify import DRAW, draw_plain, places, verified
from onward.generation.failures import NOTHING_ALLOWED, NotANumber
from onward.generation.history import NgramIndex, RequestHistory, TokenCounts
from onward.generation.request import Constraint, Request
from onward.kernels.draws import draw


class ShapedSampler:
    """The sampler for requests with draft tokens or options besides the temperature, such as top_p: computes complete
    distributions (N, V), and verifies draft tokens.

    `allowed` (V,) is False for tokens that are never sampled; None: all may be.
    """

    def __init__(self, allowed: Tensor | None = None) -> None:
        self.allowed = allowed
        self.counts, self.ngrams = TokenCounts(), WeakKeyDictionary[Request, NgramIndex]()

    def sample(
        self, logits: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> tuple[list[list[int] | Exception], Tensor]:
        """Sample the next tokens of each request; arguments and results are those of `Sampler.sample`. Unless one
        kernel samples all rows, rows of logits after a refused draft token are skipped."""
        if (plain := self.sample_plain(logits, requests, proposals)) is not None:
            return plain
        first = list(accumulate((1 + len(p.tokens) for p in proposals), initial=0))
        states = [
            r.constraint.copy() if p.tokens and r.constraint else r.constraint for r, p in zip(requests, proposals)
        ]
        result: list[list[int] | Exception] = [[] for _ in requests]
        open_, step, last = list(range(len(requests))), 0, logits
        while open_:
            prefixes = [(i, proposals[i].tokens[:step]) for i in open_]
            rows = logits if len(logits) == len(requests) else logits[[first[i] + step for i in open_]]
            last, drawn, errors = self.draw(rows, requests, prefixes, states)
            accepted = list[int]()
            for row, (i, token) in enumerate(zip(open_, drawn)):
                new = result[i]
                if row in errors:
                    result[i] = new or errors[row]  # after an accepted draft token, the next step fails at once
                elif isinstance(new, list):
                    new.append(token)
                    if [token] == proposals[i].tokens[step : step + 1] and goes_on(states[i], token):
                        accepted.append(i)
            open_, step = accepted, step + 1
        if len(logits) > len(requests):
            last = torch.tensor([0 if isinstance(new, Exception) else new[-1] for new in result])
        return result, last.to(logits.device)

    def sample_plain(
        self, logits: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> tuple[list[list[int] | Exception], Tensor] | None:
        """Sample all rows by one kernel on a CPU, as `Sampler.sample_plain` does without draft tokens."""
        tokens = draw_plain(logits, self.allowed, places(requests, proposals))
        if tokens is None or min(tokens) < 0:
            return None
        new = verified(tokens, proposals)
        return [*new], torch.tensor([each[-1] for each in new])

    def draw(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        prefixes: Sequence[tuple[int, Sequence[int]]],
        states: Sequence[Constraint | None],
    ) -> tuple[Tensor, list[int], dict[int, Exception]]:
        """Draw a token from each row of logits (N, V). Returns the tokens (N,) as a tensor and as a list, and the
        exceptions of rows without a next token. For each row, `prefixes` has the index of its request and its accepted
        draft tokens. `states` are the states of the requests' constraints after these tokens."""
        history = RequestHistory(requests, prefixes, self.counts, self.ngrams)
        places = [(requests[i], states[i], len(requests[i].tokens) + len(new)) for i, new in prefixes]
        errors: dict[int, Exception] = {}
        allowed = masks(places, self.allowed, logits, errors)
        z = process_logits(logits, [request.sampling for request, *_ in places], history, allowed, errors)
        p = z.softmax(-1).masked_fill(logits.isnan().any(-1, keepdim=True), torch.nan)  # bans may have overwritten NaN
        device = torch.device("cpu") if p.device.type == "mps" else p.device  # mps lacks fp64 for random numbers
        p = p.to(device)
        seeds, index = tensor_on(device, [[request.seed, index] for request, _, index in places]).unbind(1)
        tokens = draw(p, seeds, index, DRAW)
        drawn, finite = torch.stack([tokens, p.isfinite().all(-1).long()]).tolist()
        for row in range(len(drawn)):
            if not finite[row] and row not in errors:
                errors[row] = NotANumber() if bool(logits[row].isnan().any()) else UserError(NOTHING_ALLOWED)
        return tokens, drawn, errors


def goes_on(state: Constraint | None, token: int) -> bool:
    """Advance the state of a constraint by a token, and return whether another token may follow."""
    try:
        return state is None or state.accept(token)
    except Exception:  # raised again when the token is appended
        return False


def masks(
    rows: Sequence[tuple[Request, Constraint | None, int]],
    allowed: Tensor | None,
    like: Tensor,
    errors: dict[int, Exception],
) -> Tensor | None:
    """Return a mask (N, V) of the tokens allowed in each row of logits or, if no request restricts its tokens,
    `allowed`, a mask (V,) for all rows (None: all are allowed); `like` is a tensor (..., V) on the device of the mask.

    `rows` are, for each row of logits, its request, the state of its constraint and the index of its token. The mask
    combines `allowed` with the constraint and `min_new_tokens`. An exception of a constraint is stored in `errors`
    under the index of its row.
    """
    if all(state is None and index >= request.min_new_tokens for request, state, index in rows):
        return allowed
    result: list[Tensor] = []
    for row, (request, state, index) in enumerate(rows):
        mask = like.new_ones(like.size(-1), dtype=torch.bool) if allowed is None else allowed.clone()
        try:
            if state is not None:
                mask &= state.allowed().to(mask.device)
        except Exception as error:
            errors[row] = error
        if index < request.min_new_tokens:
            mask[list(request.stop_token_ids)] = False
        result.append(mask)
    return torch.stack(result)
