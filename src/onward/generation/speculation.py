"""Choosing tokens, one or several at a time: speculative decoding (Leviathan et al. 2023; Chen et al. 2023).

A draft proposes tokens, the model looks at all of them in one call, and each is kept with a probability such that what
comes out has exactly the model's distribution. Without proposals it is plain sampling.
Shapes: B rows, N places in all rows, K proposed tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import UserError
from onward.generation.distribution import draw, next_token_distribution, uniform
from onward.generation.request import Request
from onward.model.cache import Cache
from onward.model.config import at
from onward.model.decoder import Decoder, without_dropout

DRAW, ACCEPT, RESIDUAL, DRAFT = range(4)  # the purposes of random numbers, see `uniform`


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow, and the distributions (K, V) they were drawn from; None: they were certain."""

    tokens: list[int] = field(default_factory=list)
    distributions: Tensor | None = None


class Draft(Protocol):
    """Where proposals come from."""

    num_draft_tokens: int  # the most tokens it proposes
    cache: Cache | None  # its own, with the rows of the engine's

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        """Make ready for so many rows of this length, of a model with this vocabulary."""

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """At most `room` tokens for each request; request i is in row i."""
        ...


def verify(
    logits: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal], allowed: Tensor | None, model: Decoder
) -> list[list[int]]:
    """The next tokens of each request: proposals that are accepted, and one more.

    `logits` (N, V) are, request by request, those after its last token and after each of its proposals. A proposal x is
    accepted with probability min(1, p(x) / q(x)), p being the model's and q the draft's distribution; the first one
    that is not is replaced by a draw from max(p - q, 0), normalized, and behind the last one a token is drawn from p.
    """
    places = [(i, j) for i, proposal in enumerate(proposals) for j in range(1 + len(proposal.tokens))]
    first = [n for n, (_, j) in enumerate(places) if j == 0]  # place of each request
    texts = [requests[i].prompt + requests[i].tokens + proposals[i].tokens[:j] for i, j in places]
    p = next_token_distribution(
        logits,
        [requests[i].sampling for i, _ in places],
        texts,
        [len(requests[i].prompt) for i, _ in places],
        masks(requests, proposals, allowed, logits),
    )
    if p.device.type == "mps":  # which has no fp64, that random numbers are made in
        p = p.cpu()
    if bool(logits.isnan().any()) or not bool(p.isfinite().all()):
        raise blame(logits, p, [requests[i] for i, _ in places], model)
    seeds = torch.tensor([requests[i].seed for i, _ in places], device=p.device)
    index = torch.tensor([len(requests[i].tokens) + j for i, j in places], device=p.device)
    kept = accepted(p, places, proposals, uniform(seeds, index, ACCEPT))
    last = torch.tensor([n + k for n, k in zip(first, kept)], device=p.device)
    rest = p[last]
    for i, (proposal, k) in enumerate(zip(proposals, kept)):
        if k < len(proposal.tokens):
            rest[i] = residual(rest[i], proposal, k)
    bonus = torch.tensor([k == len(q.tokens) for q, k in zip(proposals, kept)], device=p.device)
    seeds, index = seeds[last], index[last]
    at = torch.where(bonus, uniform(seeds, index, DRAW), uniform(seeds, index, RESIDUAL))
    final = draw(rest, at).tolist()
    return [[*proposal.tokens[:k], token] for proposal, k, token in zip(proposals, kept, final)]


def accepted(p: Tensor, places: Sequence[tuple[int, int]], proposals: Sequence[Proposal], at: Tensor) -> list[int]:
    """How many proposals of each request are kept, given p (N, V) and random numbers (N,)."""
    kept = [0] * len(proposals)
    tests = [(n, i, j, proposals[i].tokens[j]) for n, (i, j) in enumerate(places) if j < len(proposals[i].tokens)]
    for n, i, j, token in tests:
        distributions = proposals[i].distributions
        q = 1.0 if distributions is None else float(distributions[j, token])
        if kept[i] == j and float(at[n]) * q < float(p[n, token]):
            kept[i] += 1
    return kept


def residual(p: Tensor, proposal: Proposal, k: int) -> Tensor:
    """What is drawn from (V,), not normalized, once proposal k was refused: max(p - q, 0)."""
    if proposal.distributions is None:
        q = torch.zeros_like(p)
        q[proposal.tokens[k]] = 1
    else:
        q = proposal.distributions[k].to(p.device)
    rest = (p - q).clamp(min=0)
    return rest if rest.any() else p  # rounding may leave nothing


def masks(
    requests: Sequence[Request], proposals: Sequence[Proposal], allowed: Tensor | None, like: Tensor
) -> Tensor | None:
    """Which tokens may come at each place, (N, V) or the same for all, (V,); V and the device are those of `like`."""
    if all(r.constraint is None and len(r.tokens) >= r.min_new_tokens for r in requests):
        return allowed
    result = []
    for request, proposal in zip(requests, proposals):
        state = request.constraint and request.constraint.copy()
        for index, token in enumerate((*proposal.tokens, None), len(request.tokens)):
            mask = like.new_ones(like.size(-1), dtype=torch.bool) if allowed is None else allowed.clone()
            if state is not None:
                mask &= state.allowed().to(mask.device)
            if index < request.min_new_tokens:
                mask[list(request.stop_token_ids)] = False
            result.append(mask)
            if state is not None and token is not None and not state.accept(token):
                state = None  # this proposal has no probability, so what follows does not matter
    return torch.stack(result)


def blame(logits: Tensor, p: Tensor, requests: Sequence[Request], model: Decoder) -> UserError:
    """Why there is no distribution to draw from."""
    nan = logits.isnan().any(-1)
    if bool(nan.any()):
        request = requests[int(nan.int().argmax())]
        tokens = torch.tensor([request.context], device=model.embed.weight.device)
        return UserError(f"the logits are not numbers: {first_nan(model, tokens)} made the first NaN")
    return UserError("no token may come next: the constraint, bans and processors of this request leave none")


def first_nan(model: Decoder, tokens: Tensor) -> str:
    """The first module of a decoder whose output holds NaN."""
    found: list[str] = []

    def look(name: str) -> object:
        def hook(module: torch.nn.Module, inputs: object, output: object) -> None:
            if not found and isinstance(output, Tensor) and bool(output.isnan().any()):
                found.append(name)

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    hooks = [module.register_forward_hook(look(name)) for name, module in leaves]  # type: ignore[arg-type]
    try:
        with torch.compiler.set_stance("force_eager"):
            model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "a call that could not be repeated"


class LookupDraft:
    """Proposes what followed the last tokens where they stood before in the text (prompt look-up, Saxena 2023)."""

    cache: Cache | None = None

    def __init__(self, num_draft_tokens: int = 8, ngram: int = 3) -> None:
        if num_draft_tokens < 1 or ngram < 1:
            raise UserError(f"a look-up of {num_draft_tokens} tokens by runs of {ngram}: both must be at least 1")
        self.num_draft_tokens, self.ngram = num_draft_tokens, ngram

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        """There is nothing to make ready."""

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        return [Proposal(self.find(r.prompt + r.tokens)[:k]) for r, k in zip(requests, room)]

    def find(self, text: list[int]) -> list[int]:
        """What followed the longest run of last tokens, at most `ngram`, where it stood last; nothing if nowhere."""
        for size in range(min(self.ngram, len(text) - 1), 0, -1):
            last = text[-size:]
            for end in range(len(text) - 1, size - 1, -1):
                if text[end - size : end] == last:
                    return text[end : end + self.num_draft_tokens]
        return []


class ModelDraft:
    """Proposes what a smaller model with the same vocabulary would say."""

    def __init__(self, model: Decoder, num_draft_tokens: int = 4) -> None:
        if num_draft_tokens < 1:
            raise UserError(f"a draft of {num_draft_tokens} tokens: it must be at least 1")
        self.model, self.num_draft_tokens, self.vocab_size = model, num_draft_tokens, model.config.vocab_size
        self.cache: Cache | None = None

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        weight, limit = self.model.embed.weight, at(self.model.config.position, 0).limit(self.model.config)
        if limit < length:
            raise UserError(f"the draft has {limit} positions and the model {length}: take one with as many")
        self.vocab_size = vocab_size
        self.cache = Cache(self.model.config, rows, length, chunk, device=weight.device, dtype=weight.dtype)

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        assert self.cache is not None
        texts = [r.prompt + r.tokens for r in requests]
        seeds = torch.tensor([r.seed for r in requests])
        tokens: list[list[int]] = [[] for _ in requests]
        found: list[Tensor] = []
        with without_dropout(self.model):
            last = self.read(requests)
            for step in range(max(room)):
                logits = self.model.logits(last)[:, 0, : self.vocab_size]  # vocabularies differ in their padding
                p = next_token_distribution(
                    F.pad(logits, (0, self.vocab_size - logits.size(1)), value=-math.inf),
                    [r.sampling for r in requests],
                    [text + new for text, new in zip(texts, tokens)],
                    [len(r.prompt) for r in requests],
                ).cpu()
                index = torch.tensor([len(r.tokens) + step for r in requests])
                found.append(p)
                for new, token in zip(tokens, draw(p, uniform(seeds, index, DRAFT)).tolist()):
                    new.append(token)
                if step + 1 < max(room):
                    # a row without room for more is fed its last token once again
                    more = [step + 1 < k for k in room]
                    pieces = [new[-1:] if on else r.context[-1:] for on, r, new in zip(more, requests, tokens)]
                    starts = [len(r.context) + (step if on else -1) for on, r in zip(more, requests)]
                    last = self.feed(pieces, starts)
        for request, k in zip(requests, room):
            request.num_draft_cached = len(request.context) + max(0, k - 1)
        return [
            Proposal(new[:k], torch.stack([p[i] for p in found[:k]]) if k else None)
            for i, (new, k) in enumerate(zip(tokens, room))
        ]

    def read(self, requests: Sequence[Request]) -> Tensor:
        """The hidden states (B, 1, D) of the last tokens, once all that is new has been fed."""
        assert self.cache is not None
        filled = [
            min(r.num_draft_cached, r.num_cached) for r in requests
        ]  # what was proposed and refused does not count
        last: list[Tensor] = []
        while not last or any(n < len(r.context) for r, n in zip(requests, filled)):
            starts = [min(n, len(r.context) - 1) for r, n in zip(requests, filled)]  # the last token may come again
            pieces = [r.context[n : n + self.cache.chunk] for r, n in zip(requests, starts)]
            hidden = self.feed(pieces, starts)
            last = [hidden[row, len(piece) - 1] for row, piece in enumerate(pieces)]
            filled = [n + len(piece) for n, piece in zip(starts, pieces)]
        return torch.stack(last)[:, None]

    def feed(self, pieces: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """The hidden states of tokens, of which those that the draft does not know are read as its last one."""
        assert self.cache is not None
        last = self.model.config.vocab_size - 1
        return feed(self.model, self.cache, 0, [[min(token, last) for token in p] for p in pieces], starts)


def feed(model: Decoder, cache: Cache, row: int, pieces: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
    """The hidden states (B, T, D) of tokens at positions from `starts` on, in the rows of a cache from `row` on."""
    width, device = max(map(len, pieces)), model.embed.weight.device
    tokens = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in pieces], device=device)
    positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
    return model.hidden(tokens, positions, cache.rows(row, row + len(pieces)).upto(max(starts) + width))


def expected_tokens(rate: float, num_draft_tokens: int) -> float:
    """Expected tokens per step where each of K = `num_draft_tokens` proposals is accepted with probability a = `rate`:
    (1 - a ** (K + 1)) / (1 - a) (Leviathan et al. 2023, equation 1)."""
    return num_draft_tokens + 1 if rate == 1 else (1 - rate ** (num_draft_tokens + 1)) / (1 - rate)
