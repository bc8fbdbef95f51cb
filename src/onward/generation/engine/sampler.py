"""The sampler: the next tokens of requests, from logits.

Shapes: N places (after each request's last token, and after each proposed one), T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onward.device import tensor_on
from onward.errors import UserError
from onward.generation.distribution import process_logits
from onward.generation.engine.history import NgramIndex, RequestHistory, TokenCounts
from onward.generation.engine.request import Request, TokenLogprob
from onward.generation.engine.speculation import Proposal, verify
from onward.generation.processors import MIN_TEMPERATURE
from onward.generation.sampling import Sampling
from onward.kernels.draws import draw_by_kernel
from onward.model.decoder import Decoder
from onward.tracing.names import activation_names
from onward.tracing.trace import trace

NOTHING_ALLOWED = "no token may come next: the constraint, bans and processors of this request leave none"


class Sampler:
    """Samples the next tokens of requests, and reads results from the device once per call.

    `allowed` (V,) is False for tokens that are never sampled.
    """

    def __init__(self, allowed: Tensor | None = None) -> None:
        self.allowed = allowed
        self.counts, self.ngrams = TokenCounts(), WeakKeyDictionary[Request, NgramIndex]()

    def sample(
        self, logits: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> tuple[list[list[int] | Exception], Tensor]:
        """The next tokens of each request, accepted proposals and one more, or the error because of which it has none.

        Where an error concerns a place after some accepted proposals, those are returned, without one more.

        `logits` (N, V) are, request by request, those after its last token and after each of its proposals. Returns
        also the last token of each request on the device, (B,).
        """
        if (plain := self.sample_plain(logits, requests, proposals)) is not None:
            return plain
        places = [(i, p.tokens[:j]) for i, p in enumerate(proposals) for j in range(1 + len(p.tokens))]
        history = RequestHistory(requests, places, self.counts, self.ngrams)
        errors: dict[int, Exception] = {}
        allowed = masks(requests, proposals, self.allowed, logits, errors)
        p = process_logits(logits, [requests[i].sampling for i, _ in places], history, allowed, errors).softmax(-1)
        p = p.masked_fill(logits.isnan().any(-1, keepdim=True), torch.nan)  # bans may have replaced NaN
        device = torch.device("cpu") if p.device.type == "mps" else p.device  # fp64, of random numbers, is not on mps
        p = p.to(device)
        seeds, index = tensor_on(device, [[r.seed, len(r.tokens)] for r in requests]).unbind(1)
        kept, last, place = verify(p, proposals, seeds, index)
        finite = p[place].isfinite().all(-1)
        result: list[list[int] | Exception] = []
        for i, (n, token, row, ok) in enumerate(torch.stack([kept, last, place, finite.long()], 1).tolist()):
            first, tokens = row - n, proposals[i].tokens
            failed = next((at for at in range(first, row + 1) if at in errors), None if ok else row)
            if failed is None:
                result.append([*tokens[:n], token])
            elif failed > first:  # the next step fails at once
                result.append(tokens[: failed - first])
            elif failed in errors:
                result.append(errors[failed])
            else:
                nan = bool(logits[failed].isnan().any())
                result.append(NotANumber() if nan else UserError(NOTHING_ALLOWED))
        return result, last.to(logits.device)

    def sample_plain(
        self, logits: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal]
    ) -> tuple[list[list[int] | Exception], Tensor] | None:
        """As `sample`, by one kernel on a CPU, where nothing but the temperature shapes the distributions of all rows;
        None elsewhere, and where a row has no distribution."""
        if not all(map(is_plain, requests, proposals)):
            return None
        factors = [inverse_temperature(request.sampling.temperature) for request in requests]
        seeds, index = [r.seed for r in requests], [len(r.tokens) for r in requests]
        drawn = draw_by_kernel(logits, self.allowed, factors, seeds, index)
        if drawn is None:
            return None
        tokens = drawn.tolist()
        return None if min(tokens) < 0 else ([[token] for token in tokens], drawn)


SHAPING = [field.name for field in fields(Sampling) if field.name != "temperature"]
PLAIN = [getattr(Sampling(), name) for name in SHAPING]


def is_plain(request: Request, proposal: Proposal) -> bool:
    """Whether nothing but the temperature shapes the distribution of a request's next token."""
    return (
        not proposal.tokens
        and request.constraint is None
        and len(request.tokens) >= request.min_new_tokens
        and [getattr(request.sampling, name) for name in SHAPING] == PLAIN
    )


def inverse_temperature(temperature: float) -> float:
    """The factor of the logits, 0 for the likeliest token."""
    return 0.0 if temperature < MIN_TEMPERATURE else 1 / temperature


class NotANumber(Exception):
    """The logits of a request are NaN; `nan_error` names the activation."""


def masks(
    requests: Sequence[Request],
    proposals: Sequence[Proposal],
    allowed: Tensor | None,
    like: Tensor,
    errors: dict[int, Exception],
) -> Tensor | None:
    """Which tokens are allowed at each place, (N, V) or, for all places, (V,); V and the device are those of `like`.

    An exception of a constraint is stored in `errors` under its place.
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
                        state = None  # this proposal has probability 0: later places are not used
            except Exception as error:
                errors[len(result)], state = error, None
            if index < request.min_new_tokens:
                mask[list(request.stop_token_ids)] = False
            result.append(mask)
    return torch.stack(result)


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int | None) -> list[list[TokenLogprob]]:
    """For each token its log-probability among logits (T, V), in a list of one; empty lists where `count` is None."""
    if count is None:
        return [[] for _ in tokens]
    log_p = logits.float().log_softmax(-1)
    top = log_p.topk(min(count, log_p.size(1)))
    pairs = [list(zip(ids, values)) for ids, values in zip(top.indices.tolist(), top.values.tolist())]
    return [[TokenLogprob(t, float(row[t]), best)] for t, row, best in zip(tokens, log_p, pairs)]


def no_distribution_error(logits: Tensor, contexts: Sequence[Sequence[int]], model: Decoder) -> UserError:
    """The error for logits (N, V) of which a row has no distribution: NaN, or no token is allowed."""
    nan = logits.isnan().any(-1)
    return nan_error(model, contexts[int(nan.int().argmax())]) if bool(nan.any()) else UserError(NOTHING_ALLOWED)


def nan_error(model: Decoder, tokens: Sequence[int]) -> UserError:
    """The error that names the first activation that is NaN for these tokens."""
    name = first_nan(model, torch.tensor([list(tokens)], device=model.device))
    return UserError(f"the logits are not numbers: {name} made the first NaN")


def first_nan(model: Decoder, tokens: Tensor) -> str:
    """The name of the first activation of a decoder that holds NaN."""
    found: list[str] = []

    def note(name: str, activation: Tensor) -> None:
        if not found and bool(activation.isnan().any()):
            found.append(name)

    large = "scores", "attn.weights"  # the output of the heads shows their NaN
    with trace(model, *(name for name in activation_names(model) if not name.endswith(large)), keep=note):
        model(tokens)
    return found[0] if found else "a call that could not be repeated"
