"""A runner that passes the model's hidden states to a draft.

Shapes: B rows, T tokens of each, V vocabulary, D d_model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from onward.generation.drafts.forward import decode_drafted
from onward.generation.drafts.proposal import Draft
from onward.generation.request import Request
from onward.generation.runner import Pieces, Runner
from onward.model.cache import CacheView
from onward.model.decoder import Decoder


@runtime_checkable
class ReadingDraft(Draft, Protocol):
    """The interface of drafts that read the hidden states of the model whose next tokens they propose."""

    def read(self, request: Request, start: int, hidden: Tensor) -> None:
        """Receive the hidden states (T, D) of a request's tokens from index `start` of prompt + answer on, after the
        last block and the final norm, as the head reads them.

        Called after each call of the model, for each request in it, before a token is drawn. The tokens may include
        draft tokens that are refused, and padding; a later call with a smaller `start` then replaces their hidden
        states. Tokens whose keys and values come from the prefix cache have no hidden states. `hidden` is overwritten
        by the next call.
        """


def hidden_step(model: Decoder, tokens: Tensor, positions: Tensor, view: CacheView) -> Tensor:
    """Run the model without checks: return the hidden states (B, T, D) for tokens (B, T) at positions (B, T), over the
    cache rows in `view`. This function is compiled to run a draft model that continues hidden states."""
    return model.hidden_of_checked(tokens, positions, view)


def reading_step(model: Decoder, tokens: Tensor, positions: Tensor, view: CacheView) -> tuple[Tensor, Tensor]:
    """Run the model without checks: return the logits (B, T, V) and the hidden states (B, T, D) for tokens (B, T) at
    positions (B, T), over the cache rows in `view`. This function is compiled to run the main model if its draft reads
    hidden states."""
    hidden = model.hidden_of_checked(tokens, positions, view)
    return model.logits(hidden), hidden


class ReadingRunner(Runner):
    """A replacement for `runner` that also passes the hidden states of each call to `draft`. Row i of the cache belongs
    to active[i]."""

    compiled_step = staticmethod(reading_step)  # type: ignore[assignment]  # which returns two tensors

    def __init__(self, runner: Runner, draft: ReadingDraft, active: Sequence[Request]) -> None:
        super().__init__(runner.model, runner.cache, runner.state, runner.compile_after)
        self.draft, self.active = draft, active

    def decode(self, requests: Sequence[Request]) -> Tensor:
        return decode_drafted(self, requests, [()] * len(requests))

    def forward_rows(
        self, first: int, pieces: Pieces, starts: Sequence[int], adapters: Sequence[str] = (), idle: Sequence[int] = ()
    ) -> Tensor:
        hidden = super().forward_rows(first, pieces, starts, adapters, idle)
        self.pass_on(first, starts, hidden)
        return hidden

    def run_compiled(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor | None:
        result: Any = super().run_compiled(tokens, positions, length)
        if result is None:
            return None
        logits, hidden = result
        self.pass_on(0, positions[:, 0].tolist(), hidden)
        return logits  # type: ignore[no-any-return]

    def pass_on(self, first: int, starts: Sequence[int], hidden: Tensor) -> None:
        """Pass the hidden states (B, T, D) of the rows from row `first` on to the draft; row i begins at position
        starts[i] of the context of its request."""
        for request, start, states in zip(self.active[first:], starts, hidden):
            self.draft.read(request, request.start + start, states)
