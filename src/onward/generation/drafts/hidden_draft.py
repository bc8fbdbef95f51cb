"""A draft that reads the model's hidden states: a small decoder that extrapolates them.

Shapes: B requests, T tokens of each, D d_model of the model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from onward.base.errors import UserError
from onward.compiled.interface import hidden_step
from onward.compiled.model_state import ModelState
from onward.generation.cache.manager import CacheManager, growing_cache
from onward.generation.drafts.forward import MAX_COMPILED
from onward.generation.drafts.guesses import Guesses
from onward.generation.drafts.proposal import Proposal
from onward.generation.request import Request
from onward.generation.runner import Pieces, Runner
from onward.model.decoder import Decoder, without_dropout
from onward.model.state_embedding import StateEmbedding

NUM_DRAFT_TOKENS = 3  # tokens per proposal by default


@dataclass
class Known:
    """The state of a request in a draft: its cache holds the hidden states of the tokens from index `first` of prompt +
    answer up to index `fed`, and `states` are the hidden states from index `fed` on."""

    first: int
    fed: int
    states: Tensor  # (T, D)

    def end(self) -> int:
        return self.fed + len(self.states)


class HiddenDraft:
    """A draft for speculative decoding that extrapolates the hidden states of the model (Li et al. 2024, EAGLE;
    DeepSeek-AI 2024, multi-token prediction). `model` is a decoder with a StateEmbedding: from a hidden state at a
    token and the next token it predicts the token after that, and a hidden state to continue from. It proposes up to
    `num_draft_tokens` tokens."""

    layers: Sequence[int] = ()

    def __init__(self, model: Decoder, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> None:
        if num_draft_tokens < 1:
            raise UserError(f"num_draft_tokens is {num_draft_tokens}: it must be at least 1")
        self.model, self.num_draft_tokens = model, num_draft_tokens
        self.manager: CacheManager | None = None

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        """Create the draft's cache for an engine with `rows` rows of `length` tokens, which processes at most `chunk`
        tokens of a row per call; `vocab_size` is that of the engine's model."""
        model = self.model
        self.manager = growing_cache(model, rows, length, chunk, self.num_draft_tokens)
        self.cache, self.state = self.manager.cache, ModelState(model)
        self.runner = HiddenRunner(model, self.cache, self.state)
        self.guesses, self.known = Guesses(vocab_size), WeakKeyDictionary[Request, Known]()

    def read(self, request: Request, start: int, hidden: Tensor) -> None:
        """Receive hidden states of the model; see `ReadingDraft.read`."""
        known = self.known.get(request)
        if (
            known is None
            or known.fed - known.first != request.num_draft_cached
            or not known.fed <= start <= known.end()
        ):
            request.num_draft_cached = 0
            known = self.known[request] = Known(start, start, hidden[:0])
        known.states = torch.cat([known.states[: start - known.fed], hidden])

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """Return a proposal of at most room[i] tokens for requests[i], drawn with the request's own sampling options
        and random numbers."""
        if not max(room) or any(request not in self.known for request in requests):  # see `ReadingDraft.read`
            return [Proposal() for _ in requests]
        known, tokens = [self.known[request] for request in requests], list[list[int]]([] for _ in requests)
        for request, one in zip(requests, known):
            one.first = one.fed - request.num_draft_cached  # the row of a preempted request was freed
        with torch.inference_mode(), without_dropout(self.model):
            self.state.confirmed = False
            states = self.catch_up(requests, known)
            starts = [one.fed - one.first for one in known]
            room = [min(most, 1 + self.cache.length - start) for most, start in zip(room, starts)]
            for step in range(max(room)):
                for i, guess in enumerate(self.guesses.draw(self.runner.logits(states), requests, tokens)):
                    room[i] = min(room[i], step) if guess < 0 else room[i]
                    tokens[i].append(max(guess, 0))
                if step + 1 < max(room):
                    places = [min(start + step, self.cache.length - 1) for start in starts]
                    states = self.forward([new[-1:] for new in tokens], states[:, None], places)[:, 0]
        return [Proposal(new[:most]) for new, most in zip(tokens, room)]

    def catch_up(self, requests: Sequence[Request], known: Sequence[Known]) -> Tensor:
        """Run the draft on the hidden states that its cache lacks, each with the token after its position, and return
        the draft's hidden states (B, D) after each request's last token."""
        result: dict[int, Tensor] = {}
        while len(result) < len(requests):
            pieces, states = list[list[int]](), list[Tensor]()
            for row, (request, one) in enumerate(zip(requests, known)):
                following = request.context_from(one.fed + 1 - request.start)
                new = len(following) if row not in result else 0
                # padding, if the request is done
                pieces.append(following[: self.cache.chunk] if new else [request.last_token])
                states.append(one.states[: len(pieces[-1])] if new else self.padding)
            hidden = self.forward(
                pieces, pad_sequence(states, batch_first=True), [one.fed - one.first for one in known]
            )
            for row, (request, one, piece) in enumerate(zip(requests, known, pieces)):
                if row not in result:
                    one.fed, one.states = one.fed + len(piece), one.states[len(piece) :]
                    request.num_draft_cached = one.fed - one.first
                    if one.fed == request.start + request.num_context_tokens - 1:
                        result[row] = hidden[row, len(piece) - 1]
        return torch.stack([result[row] for row in range(len(requests))])

    @property
    def padding(self) -> Tensor:
        return torch.zeros(1, self.model.config.d_model, dtype=self.model.dtype, device=self.model.device)

    def forward(self, pieces: Pieces, states: Tensor, starts: Sequence[int]) -> Tensor:
        """Run the draft on the next tokens of each request, `pieces`, and the hidden states (B, T, D) of the tokens
        before them; piece i begins at position starts[i]. Returns the draft's hidden states (B, T, D)."""
        assert self.manager is not None
        for row, (piece, start) in enumerate(zip(pieces, starts)):
            self.manager.reserve(row, start, start + len(piece))
        embed = self.model.embed
        assert isinstance(embed, StateEmbedding)
        embed.note(states)
        if all(len(piece) == states.size(1) <= MAX_COMPILED for piece in pieces):
            compiled = self.runner.run_compiled(*self.runner.inputs(pieces, starts), max(starts) + states.size(1))
            if compiled is not None:
                return compiled.clone()
        return self.runner.forward_rows(0, pieces, starts)


class HiddenRunner(Runner):
    """The runner of a HiddenDraft's model, whose compiled steps return hidden states."""

    compiled_step = staticmethod(hidden_step)
