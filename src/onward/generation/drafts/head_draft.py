"""Drafts by a draft head, which predicts the tokens after the next one from the last hidden state of the model.

Shapes: B requests, T tokens, D d_model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.generation.cache.manager import CacheManager
from onward.generation.drafts.estimates import Estimates
from onward.generation.drafts.guess_program import GuessProgram, guess_program
from onward.generation.drafts.guesses import Guesses
from onward.generation.drafts.paced import LENGTHS
from onward.generation.drafts.proposal import Proposal
from onward.generation.drafts.times import expected_tokens
from onward.generation.request import Request, is_plain
from onward.kernels.available import unavailable
from onward.model.decoder import Decoder
from onward.model.draft_head import DraftHead, embedded

NUM_DRAFT_TOKENS = LENGTHS[-1]  # tokens per proposal by default
OF_PROGRAM = 1.25  # the same for one weight of a compiled draft head: a byte, and its conversion
TRUST = 0.4  # a draft token of probability p is accepted with probability p ** TRUST; measured with stories260K
COMPILE_AFTER = 8  # uncompiled proposals for a number of requests before the draft head is compiled for it


class HeadDraft:
    """A draft for speculative decoding that continues the hidden state of `model` by its draft head (Ankner et al.
    2024). It proposes up to `num_draft_tokens` tokens. On a CPU, a compiled program computes them after COMPILE_AFTER
    proposals, if it can be compiled."""

    manager: CacheManager | None = None
    layers: Sequence[int] = ()

    def __init__(self, model: Decoder, head: DraftHead, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> None:
        if num_draft_tokens < 1:
            raise UserError(f"num_draft_tokens is {num_draft_tokens}: it must be at least 1")
        self.model, self.head, self.num_draft_tokens = model, head, num_draft_tokens
        # number of draft tokens -> the least probability that all are accepted at which more are drafted
        self.least: dict[int, float] = {}
        self.states = WeakKeyDictionary[Request, tuple[int, Tensor]]()  # (index of the first token, (T, D))

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        """Prepare the draft for an engine of a model with `vocab_size` tokens; it has no cache of its own."""
        self.guesses, self.programs = Guesses(vocab_size), dict[int, GuessProgram | None]()

    def read(self, request: Request, start: int, hidden: Tensor) -> None:
        """Receive hidden states of the model; see `ReadingDraft.read`."""
        self.states[request] = start, hidden.clone()

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """Return a proposal of at most room[i] tokens for requests[i], drawn with the random numbers with which the
        model will draw these tokens."""
        if not max(room) or any(request not in self.states for request in requests):  # see `ReadingDraft.read`
            return [Proposal() for _ in requests]
        states = []
        for request in requests:
            first, of_tokens = self.states[request]
            states.append(of_tokens[request.start + request.num_context_tokens - 2 - first])
        with torch.inference_mode():
            tokens = self.guess(torch.stack(states), requests, max(room))
        known = [next((k for k, token in enumerate(new) if token < 0), len(new)) for new in tokens]
        return [Proposal(new[: min(most, end)]) for new, most, end in zip(tokens, room, known)]

    def guess(self, state: Tensor, requests: Sequence[Request], count: int) -> list[list[int]]:
        """Return at most `count` draft tokens for each request, computed from the hidden states (B, D); a draft token
        is -1 where there is no distribution."""
        program, plain = self.program(len(requests)), all(map(is_plain, requests))
        tokens, last = list[list[int]]([] for _ in requests), [request.last_token for request in requests]
        reached = [1.0] * len(requests)  # the probability that all draft tokens so far are accepted
        if program:
            program.start(state, requests)
        for k in range(1, count + 1):
            if program:
                of_program, p, logits = program.run()
            else:
                state = self.head(state, embedded(self.model, torch.tensor(last, device=state.device)))
                logits = self.model.logits(self.head.norm(state)[None])[0]
            if program and plain:
                drawn = of_program.tolist()
            else:
                drawn = self.guesses.draw(logits, requests, tokens)
                if self.least:
                    p = logits.float().softmax(-1).gather(-1, torch.tensor(drawn, device=state.device).relu_()[:, None])
            for new, token in zip(tokens, drawn):
                new.append(token)
            last = [max(token, 0) for token in drawn]
            if program and not plain:
                program.last.copy_(torch.tensor(last))
            if self.least:
                reached = [before * new**TRUST for before, [new] in zip(reached, p.tolist())]
                if sum(reached) / len(reached) < self.least.get(k, 0):
                    break
        return tokens

    def program(self, rows: int) -> GuessProgram | None:
        """Return the compiled program for `rows` requests; None on an accelerator, before COMPILE_AFTER uncompiled
        proposals for `rows` requests, and if it cannot be compiled."""
        if self.model.device.type != "cpu" or unavailable():
            return None
        plain = PLAIN.setdefault(self.head, Counter())
        if plain[rows] < COMPILE_AFTER:
            plain[rows] += 1
            return None
        if rows not in self.programs:
            self.programs[rows] = guess_program(self.model, self.head, rows)
        return self.programs[rows]


PLAIN: WeakKeyDictionary[DraftHead, Counter[int]] = WeakKeyDictionary()  # uncompiled proposals so far, by rows


class PacedHead(HeadDraft):
    """A draft head that adapts the length of its proposals: the length that saves the most time given the
    share of draft tokens accepted so far and the probabilities of the new ones (see `estimates`), or 0 if no length
    saves enough time or if too many requests decode."""

    def __init__(self, model: Decoder, head: DraftHead) -> None:
        weights = model.config.vocab_size * model.config.d_embed + sum(p.numel() for p in head.parameters())
        self.estimates = Estimates(
            model, weights * (OF_PROGRAM if model.device.type == "cpu" else model.dtype.itemsize)
        )
        super().__init__(model, head, self.estimates.lengths[-1])

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """Return a proposal of one of `lengths` tokens, at most room[i], for requests[i]; empty proposals if none fits
        or saves enough time."""
        gain, rate = self.estimates.gain(requests)
        if not gain:
            return [Proposal() for _ in requests]
        rows, time = len(requests), self.estimates.time
        self.least = {
            n: gain * (time(more, rows) - time(n, rows)) / (expected_tokens(rate, more - n) - 1)
            for n, more in pairwise(self.estimates.lengths)
        }
        return super().propose(requests, self.estimates.room(room))
