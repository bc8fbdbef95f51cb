"""A draft that is a smaller model, for speculative decoding.

Shapes: B requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.compiled.model_state import ModelState
from onward.config.decoder import at
from onward.generation.cache.manager import CacheManager
from onward.generation.cache.rotations import last_length
from onward.generation.drafts.forward import compiled_logits
from onward.generation.drafts.guesses import Guesses
from onward.generation.drafts.proposal import Proposal
from onward.generation.request import Request
from onward.generation.runner import Runner
from onward.model.cache import KVCache
from onward.model.decoder import Decoder, without_dropout
from onward.model.rows import Row, labeled

NUM_DRAFT_TOKENS = 4  # tokens per proposal by default


class ModelDraft:
    """A draft for speculative decoding that proposes up to `num_draft_tokens` tokens, sampled from a smaller model with
    the same vocabulary."""

    def __init__(self, model: Decoder, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> None:
        if num_draft_tokens < 1:
            raise UserError(f"num_draft_tokens is {num_draft_tokens}: it must be at least 1")
        self.model, self.num_draft_tokens = model, num_draft_tokens
        self.manager: CacheManager | None = None
        self.runner: Runner | None = None

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        """Create the draft model's cache for an engine with `rows` rows of `length` tokens, which processes at most
        `chunk` tokens of a row per call; `vocab_size` is that of the engine's model. Raises a UserError if the draft
        model has fewer positions than `length`."""
        model, limit = self.model, at(self.model.config.position, 0).limit(self.model.config)
        if limit < length:
            raise UserError(
                f"Cannot draft for a context of {length} tokens, because the draft has {limit} positions: "
                "choose a draft with at least as many positions"
            )
        self.length = length
        keep = self.num_draft_tokens
        cache = KVCache(model.config, rows, length, chunk, keep=keep, device=model.device, dtype=model.dtype)
        self.manager = CacheManager(cache)
        if self.runner and self.runner.compiled:
            self.runner.compiled.release()
        self.state = ModelState(model)
        self.runner = Runner(model, self.manager.cache, self.state)
        self.last_lengths = WeakKeyDictionary[Request, int]()  # lengths of the draft model's rows
        self.guesses = Guesses(vocab_size)

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """Return a proposal of at most room[i] tokens for requests[i], sampled from the draft model with the request's
        sampling options and with the random numbers with which the model will draw these tokens."""
        room, tokens = list(room), list[list[int]]([] for _ in requests)
        assert self.runner is not None
        with without_dropout(self.model):
            self.state.confirmed = False
            last = self.catch_up(requests)
            for step in range(max(room)):
                for i, token in enumerate(self.guesses.draw(last, requests, tokens)):
                    room[i] = min(room[i], step) if token < 0 else room[i]
                    tokens[i].append(max(token, 0))
                if step + 1 < max(room):
                    # a row without room for more is idle: it is fed padding at its next position
                    idle = [i for i, most in enumerate(room) if step + 1 >= most]
                    pieces = [
                        [r.last_token] if i in idle else new[-1:] for i, (r, new) in enumerate(zip(requests, tokens))
                    ]
                    ends = [r.num_context_tokens + min(step, max(0, most - 1)) for r, most in zip(requests, room)]
                    last = self.forward(requests, pieces, [min(end, self.length - 1) for end in ends], idle)
        for request, most in zip(requests, room):
            request.num_draft_cached = request.num_context_tokens + max(0, most - 1)
        return [Proposal(new[:most]) for new, most in zip(tokens, room)]

    def catch_up(self, requests: Sequence[Request]) -> Tensor:
        """Run the draft model on the tokens of each request that its cache lacks, and return the logits (B, V) after
        each request's last token."""
        assert self.manager is not None
        for row, request in enumerate(requests):
            request.num_draft_cached = self.continued(row, request)
        cached = [min(r.num_draft_cached, r.num_cached) for r in requests]  # refused proposals are rolled back
        logits: Tensor | None = None
        while logits is None or any(n < r.num_context_tokens for r, n in zip(requests, cached)):
            # at least the last token is fed
            starts = [min(n, r.num_context_tokens - 1) for r, n in zip(requests, cached)]
            pieces = [r.context_from(n)[: self.manager.cache.chunk] for r, n in zip(requests, starts)]
            if max(map(len, pieces)) == 2:  # after all proposals were accepted: two compiled steps are faster
                pieces = [piece[:1] for piece in pieces]
            logits = self.forward(requests, pieces, starts)
            cached = [n + len(piece) for n, piece in zip(starts, pieces)]
        return logits

    def continued(self, row: int, request: Request) -> int:
        """Return how many cached tokens of a request are valid: none once the context has become so long that the draft
        model scales its rotary positions differently."""
        assert self.manager is not None
        if request.num_draft_cached and request.num_context_tokens <= self.last_lengths[request]:
            return request.num_draft_cached
        length, cache = request.num_context_tokens, self.manager.cache
        self.last_lengths[request] = last_length(cache.config, length, cache.length)
        self.manager.allocate(row, request.context, length)
        return 0

    def forward(
        self,
        requests: Sequence[Request],
        pieces: Sequence[Sequence[int]],
        starts: Sequence[int],
        idle: Sequence[int] = (),
    ) -> Tensor:
        """Run the draft model on `pieces`, the next tokens of each request; piece i begins at position starts[i].
        Returns the logits (B, V) after each piece; the pieces with the indices `idle` are padding. Token ids outside
        the draft model's vocabulary are replaced by its last id."""
        assert self.manager is not None
        assert self.runner is not None
        last_id = self.model.config.vocab_size - 1
        for row, (piece, start) in enumerate(zip(pieces, starts)):
            self.manager.reserve(row, start, start + len(piece))
        pieces = [[min(token, last_id) for token in piece] for piece in pieces]
        counted = idle and self.manager.cache.states
        if not counted and (logits := compiled_logits(self.runner, pieces, starts)) is not None:
            return logits[:, -1]
        rows = [Row(None, len(piece), 0, r.start + start) for r, piece, start in zip(requests, pieces, starts)]
        with labeled(rows):
            hidden = self.runner.forward_rows(0, pieces, starts, idle=idle)
        with labeled(Row(None, 1, 0, row.start + row.tokens - 1) for row in rows):
            return self.runner.logits(torch.stack([row[len(piece) - 1] for row, piece in zip(hidden, pieces)]))
