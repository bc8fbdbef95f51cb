"""Drafts by a draft head, which guesses the tokens after the next one from the last hidden state of the model.

Shapes: B requests, K guesses, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.compiled.interface import NotCompilable
from onward.generation.cache.manager import CacheManager
from onward.generation.drafts.guesses import Guesses
from onward.generation.drafts.paced import COST, LENGTHS, MOST_ROWS, OF_INTEGERS, has_integer_weights
from onward.generation.drafts.proposal import Proposal
from onward.generation.drafts.times import expected_tokens
from onward.generation.request import Request, inverse_temperature, is_plain
from onward.kernels.available import unavailable
from onward.kernels.drawn_tokens import drawn_tokens  # noqa: F401  # which registers the operation
from onward.model.cache import KVCache
from onward.model.decoder import Decoder
from onward.model.draft_head import DraftHead, embedded

NUM_DRAFT_TOKENS = LENGTHS[-1]  # tokens per proposal by default
# overhead of a proposal and of a step, as the number of weights that are read in that time
AROUND_PROPOSAL, AROUND_STEP = 1_100_000, 4_000_000
LIKELY, TRIALS = 0.8, 5  # prior share of accepted guesses, and its weight as a number of guesses
LEAST_GAIN = 1.15  # least estimated speed-up for a proposal; above 1 because estimates may be wrong
COMPILE_AFTER = 8  # uncompiled proposals for a number of requests before the guesses are compiled
MAX_CHAINS = 16  # compiled chains of guesses that a head keeps


def head_draft(model: Decoder, head: DraftHead | None, cache: KVCache | None) -> PacedHead | None:
    """Return the draft of a model with a draft head, which proposes tokens only while this saves time; None if the
    model has no draft head, or if `cache` is given and cannot verify the guesses."""
    if head is None or (cache and (cache.chunk <= LENGTHS[-1] or (cache.states and cache.keep < LENGTHS[-1]))):
        return None
    return PacedHead(model, head)


class HeadDraft:
    """A draft for speculative decoding that continues the hidden state of `model` by its draft head (Ankner et al.
    2024). It proposes up to `num_draft_tokens` tokens. On a CPU, one compiled program computes all guesses of a
    proposal."""

    manager: CacheManager | None = None

    def __init__(self, model: Decoder, head: DraftHead, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> None:
        if num_draft_tokens < 1:
            raise UserError(f"num_draft_tokens is {num_draft_tokens}: it must be at least 1")
        self.model, self.head, self.num_draft_tokens = model, head, num_draft_tokens
        self.states = WeakKeyDictionary[Request, tuple[int, Tensor]]()  # (index of the first token, (T, D))

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        """Prepare the draft for an engine of a model with `vocab_size` tokens; it has no cache of its own."""
        self.guesses, self.chains = Guesses(vocab_size), dict[tuple[int, int], Chain | None]()

    def read(self, request: Request, start: int, hidden: Tensor) -> None:
        """Receive hidden states of the model; see `ReadingDraft.read`."""
        self.states[request] = start, hidden.clone()

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """Return a proposal of at most room[i] tokens for requests[i], drawn with the random numbers with which the
        model will draw these tokens."""
        if not max(room):
            return [Proposal() for _ in requests]
        states = []
        for request in requests:
            first, of_tokens = self.states[request]
            states.append(of_tokens[request.start + request.num_context_tokens - 2 - first])
        with torch.inference_mode():
            if (chain := self.chain(requests, max(room))) is not None:
                tokens = chain.run(states, requests)
            else:
                tokens = self.guess(torch.stack(states), requests, max(room))
        known = [next((k for k, token in enumerate(new) if token < 0), len(new)) for new in tokens]
        return [Proposal(new[: min(most, end)]) for new, most, end in zip(tokens, room, known)]

    def guess(self, state: Tensor, requests: Sequence[Request], count: int) -> list[list[int]]:
        """Return `count` guesses for each request, computed from the hidden states (B, D); -1 from the first guess
        without a distribution on."""
        tokens, last = list[list[int]]([] for _ in requests), [request.last_token for request in requests]
        for _ in range(count):
            state = self.head(state, embedded(self.model, torch.tensor(last, device=state.device)))
            drawn = self.guesses.draw(self.model.logits(self.head.norm(state)[None])[0], requests, tokens)
            for new, token in zip(tokens, drawn):
                new.append(token)
            last = [max(token, 0) for token in drawn]
        return tokens

    def chain(self, requests: Sequence[Request], count: int) -> Chain | None:
        """Return a compiled chain of `count` guesses for `len(requests)` requests; None before COMPILE_AFTER uncompiled
        proposals of this shape, or if the guesses depend on more than the temperature."""
        shape = len(requests), count
        if self.model.device.type != "cpu" or not all(map(is_plain, requests)) or unavailable():
            return None
        plain = PLAIN.setdefault(self.head, Counter())
        if plain[shape] < COMPILE_AFTER:
            plain[shape] += 1
            return None
        if shape not in self.chains:
            self.chains[shape] = chain_of(self.model, self.head, *shape)
        return self.chains[shape]


class PacedHead(HeadDraft):
    """A draft head that adapts the length of its proposals: the one of `lengths` that saves the most time given the
    share of guesses accepted so far, or 0 if no length saves enough time or if more than `most_rows` requests decode.

    The time of a proposal, in plain decoding steps, is estimated from the weights that a guess and a step read, and not
    measured, so that a request takes the same steps whenever it is repeated.
    """

    def __init__(self, model: Decoder, head: DraftHead) -> None:
        integers = has_integer_weights(model)
        self.lengths: Sequence[int] = OF_INTEGERS if integers else LENGTHS
        self.most_rows = 1 if integers else MOST_ROWS
        super().__init__(model, head, self.lengths[-1])
        size = lambda module: sum(parameter.numel() for parameter in module.parameters())
        step = AROUND_STEP + size(model) - (0 if model.config.tied else size(model.embed))
        self.around = AROUND_PROPOSAL / step
        self.one = (size(head) + model.config.vocab_size * model.config.d_embed) / step

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """Return a proposal of one of `lengths` tokens, at most room[i], for requests[i]; empty proposals if none fits
        or saves enough time."""
        count = len(requests)
        shares = [(LIKELY * TRIALS + r.num_accepted) / (TRIALS + r.num_drafted) for r in requests]
        rate = min(sum(shares) / count, 0.99)
        gains = {n: expected_tokens(rate, n) / self.time(n, count) for n in self.lengths}
        best = max(gains, key=gains.__getitem__)
        if count > self.most_rows or gains[best] < LEAST_GAIN:
            return [Proposal() for _ in requests]
        fitting = [max((n for n in self.lengths if n <= min(most, best)), default=0) for most in room]
        return super().propose(requests, fitting)

    def time(self, length: int, rows: int) -> float:
        """Estimate the time of a step with proposals of `length` tokens, in units of a plain step with the same number
        of rows."""
        verifying = (1 + COST * (rows * (1 + length) - 1)) / (1 + COST * (rows - 1))
        return verifying + self.around + length * self.one


class Chain:
    """One program that draws `count` guesses for each of `rows` requests, each from the logits after the previous
    guess."""

    def __init__(self, model: Decoder, head: DraftHead, rows: int, count: int) -> None:
        from onward.compiled.function import CompiledFunction  # imported here because it imports the compiler

        self.state = torch.zeros(rows, model.config.d_model, dtype=model.dtype)
        self.numbers = torch.zeros(3, rows, dtype=torch.int64)  # last tokens, seeds, lengths of the answers
        self.factors, self.temperatures = torch.zeros(rows), [0.0] * rows

        def guesses() -> Tensor:
            state, (last, seeds, lengths), tokens = self.state, self.numbers, list[Tensor]()
            for k in range(count):
                state = head(state, embedded(model, last))
                logits = model.logits(head.norm(state)[None])[0]
                last = torch.ops.onward.drawn_tokens(logits, self.factors, seeds, lengths + k)
                tokens.append(last)
            return torch.stack(tokens, 1)

        inputs = self.state, self.numbers, self.factors
        self.program = CompiledFunction(guesses, inputs, weights_of(model, head))

    def run(self, states: Sequence[Tensor], requests: Sequence[Request]) -> list[list[int]]:
        """Return the guesses for each request, computed from its hidden state (D,); -1 where there is no
        distribution."""
        torch.stack([*states], out=self.state)
        last, lengths = [r.last_token for r in requests], [len(r.tokens) for r in requests]
        self.numbers.copy_(torch.tensor([last, [r.seed for r in requests], lengths]))
        if self.temperatures != (temperatures := [r.sampling.temperature for r in requests]):
            self.factors.copy_(torch.tensor([inverse_temperature(t) for t in temperatures]))
            self.temperatures = temperatures
        return self.program.run().tolist()


PLAIN: WeakKeyDictionary[DraftHead, Counter[tuple[int, int]]] = WeakKeyDictionary()  # uncompiled proposals so far
CHAINS: WeakKeyDictionary[DraftHead, dict[tuple[int, ...], Chain | None]] = WeakKeyDictionary()


def weights_of(model: Decoder, head: DraftHead) -> list[Tensor]:
    parts = model.embed, model.embed_in, model.embed_norm, model.embed_out, model.head, head
    tensors = [t for part in parts for t in (*part.parameters(), *part.buffers())]
    return [*{tensor.data_ptr(): tensor for tensor in tensors}.values()]


def chain_of(model: Decoder, head: DraftHead, rows: int, count: int) -> Chain | None:
    """Return the compiled chain of `count` guesses for `rows` requests, compiled once and reused while the weights stay
    at the same addresses; None if it cannot be compiled."""
    chains = CHAINS.setdefault(head, {})
    key = rows, count, *(tensor.data_ptr() for tensor in weights_of(model, head))
    if key not in chains:
        if len(chains) >= MAX_CHAINS:
            chains.clear()
        try:
            chains[key] = Chain(model, head, rows, count)
        except NotCompilable:
            chains[key] = None
    return chains[key]
