"""A runner that passes the model's hidden states to a draft.

Shapes: B rows, T tokens of each, V vocabulary, D d_model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from onward.compiled.interface import Step
from onward.generation.drafts.forward import decode_drafted
from onward.generation.drafts.proposal import Draft
from onward.generation.request import Request
from onward.generation.runner import Pieces, Runner
from onward.model.cache import CacheView
from onward.model.decoder import Decoder


@runtime_checkable
class ReadingDraft(Draft, Protocol):
    """The interface of drafts that read the hidden states of the model whose next tokens they propose."""

    layers: Sequence[int]  # empty, or numbers of blocks: then their inputs, side by side, are the hidden states

    def read(self, request: Request, start: int, hidden: Tensor) -> None:
        """Receive the hidden states (T, D) of a request's tokens from index `start` of prompt + answer on: by default
        after the last block and the final norm, as the head reads them.

        Called after each call of the model, for each request in it, before a token is drawn. The tokens may include
        draft tokens that are refused, and padding; a later call with a smaller `start` then replaces their hidden
        states. Tokens whose keys and values come from the prefix cache have no hidden states; so a request whose answer
        had begun when it was added can decode without any. `hidden` is overwritten by the next call.
        """


@contextmanager
def reading(model: Decoder, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Return a context in which a list receives, during the forward pass, the inputs (B, T, D) of the blocks with the
    numbers `layers`; the number of blocks stands for the final norm."""
    inputs: list[Tensor] = []
    readers = [*model.blocks, model.norm]
    hooks = [readers[n].register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for n in sorted(layers)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


@cache
def reading_step(layers: tuple[int, ...], head: bool) -> Step:
    """Return a function to compile: it runs the model without checks, for tokens (B, T) at positions (B, T) over the
    cache rows in `view`, and returns the logits (B, T, V), without `head` the hidden states (B, T, D), and the hidden
    states that a draft with `layers` reads."""

    def step(model: Decoder, tokens: Tensor, positions: Tensor, view: CacheView) -> tuple[Tensor, Tensor]:
        with reading(model, layers) as inputs:
            hidden = model.hidden_of_checked(tokens, positions, view)
        return model.logits(hidden) if head else hidden, torch.cat(inputs, -1) if layers else hidden

    return step


class ReadingRunner(Runner):
    """A replacement for `runner` that also passes the hidden states of each call to `draft`. Row i of the cache belongs
    to active[i]."""

    def __init__(self, runner: Runner, draft: ReadingDraft, active: Sequence[Request]) -> None:
        super().__init__(runner.model, runner.cache, runner.state, runner.compile_after)
        self.draft, self.active, self.layers = draft, active, tuple(draft.layers)
        self.compiled_step, self.prompt_step = reading_step(self.layers, True), reading_step(self.layers, False)

    def decode(self, requests: Sequence[Request]) -> Tensor:
        return decode_drafted(self, requests, [()] * len(requests))

    def forward_rows(
        self, first: int, pieces: Pieces, starts: Sequence[int], adapters: Sequence[str] = (), idle: Sequence[int] = ()
    ) -> Tensor:
        with reading(self.model, self.layers) as inputs:
            hidden = super().forward_rows(first, pieces, starts, adapters, idle)
        self.pass_on(first, starts, torch.cat(inputs, -1) if inputs else hidden)
        return hidden

    def prefill(self, first: int, pieces: Pieces, starts: Sequence[int], adapters: Sequence[str] = ()) -> Tensor:
        result: Any = super().prefill(first, pieces, starts, adapters)
        if isinstance(result, Tensor):  # of `forward_rows`
            return result
        hidden, states = result
        self.pass_on(first, starts, states)
        return hidden  # type: ignore[no-any-return]

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
