"""The runner: builds the input tensors of a step, and calls the model on rows of a cache.

Shapes: B rows, T tokens in one call, D d_model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from onward.base.device import tensor_on
from onward.compiled.fingerprint import ModelState
from onward.compiled.steps import COMPILE_AFTER, Steps
from onward.generation.request import Request
from onward.model.adapters import Selection, adapter_names, check_adapter, selection
from onward.model.cache import CacheView, KVCache
from onward.model.decoder import Decoder

BUCKET = 64  # cache lengths are rounded up to a multiple of it, so that the same view serves many steps
MAX_VIEWS = 64  # views that are kept


class Runner:
    """The calls of a model over the rows of a KV cache, for an engine. After `compile_after` steps (None: never), a
    decoding step is compiled.

    Views of the cache are made once per range of rows and rounded length, and reused in later steps. While the same
    rows decode, sampled tokens and positions stay on the device: the next step needs no copy from the host.
    `state.follow()` is called before each step.
    """

    def __init__(self, model: Decoder, cache: KVCache, compile_after: int | None = COMPILE_AFTER) -> None:
        self.model, self.cache = model, cache
        self.state = ModelState(model)
        self.steps = Steps(model, cache, self.state, compile_after)
        self.capacity = cache.capacity
        self.views: dict[tuple[int, int, int], CacheView] = {}
        self.decoding: list[Request] = []  # the requests of the last call of `decode`
        self.starts: list[int] = []  # the positions of their last tokens
        self.sampled_for: list[Request] = []  # the requests of the tokens in `sampled`
        self.selection = Selection()  # of the model's adapters
        self.positions = self.sampled = torch.empty(0)  # on the device: these positions, the sampled tokens; (B,)

    def view(self, first: int, end: int, length: int) -> CacheView:
        """Return a view of rows `first` to `end` - 1 of the cache, for attention over positions below `length`; the
        length is rounded up, so that views can be reused."""
        if self.capacity != self.cache.capacity:  # a cache that grew has other tensors
            self.views.clear()
            self.capacity = self.cache.capacity
        key = first, end, -(-length // BUCKET) * BUCKET
        if key not in self.views:
            if len(self.views) >= MAX_VIEWS:
                self.views.clear()
            self.views[key] = self.cache.view(*key)
        return self.views[key]

    def adapter(self, name: str | None) -> str:
        """Return the name of the LoRA adapter that a request uses: `name` or, for None, the adapter that the model uses
        at present. Raises a UserError if the model does not have it."""
        self.selection = selection(self.model)
        if name is None:
            return self.selection.name
        check_adapter(name, adapter_names(self.model))
        return name

    def forward_rows(
        self, first: int, pieces: Sequence[Sequence[int]], starts: Sequence[int], adapters: Sequence[str] = ()
    ) -> Tensor:
        """Run the model on `pieces`, the next tokens of each row from row `first` on; piece i begins at position
        starts[i]. Returns the hidden states (B, T, D). `adapters` names the adapter of each row; empty: the adapter
        that the model uses at present.

        Shorter pieces are padded with their own last token: NaN from a token never reaches another row.
        """
        width = max(map(len, pieces))
        tokens, positions = self.inputs([[*piece, *[piece[-1]] * (width - len(piece))] for piece in pieces], starts)
        view = self.view(first, first + len(pieces), max(starts) + width)
        with self.using(adapters):
            return self.model.hidden(tokens, positions, view)

    def inputs(self, pieces: Sequence[Sequence[int]], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the model's inputs, tokens and positions, each (B, T), for `pieces`, token lists of equal length;
        piece i begins at position starts[i]."""
        tokens = tensor_on(self.model.device, pieces)
        return tokens, tensor_on(self.model.device, starts)[:, None] + torch.arange(
            tokens.size(1), device=tokens.device
        )

    def using(self, adapters: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context in which the model applies the adapter named in `adapters` to each row; if `adapters` is
        empty, the adapter that the model uses at present."""
        return self.selection.use(adapters) if adapters else nullcontext()

    def decode(self, requests: Sequence[Request]) -> Tensor:
        """Run the model on the last token of each request; returns the logits (B, V) after these tokens. Request i is
        in row i of the cache."""
        starts, adapters = [request.num_cached for request in requests], [r.adapter or "" for r in requests]
        if not self.follows(requests, starts):
            device = self.model.device
            self.sampled = tensor_on(device, [request.last_token for request in requests])
            self.positions = tensor_on(device, starts)
        self.decoding, self.starts = list(requests), starts
        tokens, positions, length = self.sampled[:, None], self.positions[:, None], max(starts) + 1
        with self.using(adapters):
            if (logits := self.steps.run(tokens, positions, length)) is not None:
                return logits[:, 0]
            hidden = self.model.hidden(tokens, positions, self.view(0, len(requests), length))
            return self.logits(hidden.flatten(0, 1), adapters)

    def keep(self, requests: Sequence[Request], sampled: Tensor) -> None:
        """Keep the tokens (B,) that were sampled for these requests on the device, as inputs of the next `decode`."""
        self.sampled_for, self.sampled = list(requests), sampled

    def forget(self) -> None:
        """Discard the tokens and positions kept on the device, so that the next decoding step copies them from its
        requests."""
        self.decoding = []

    def logits(self, hidden: Tensor, adapters: Sequence[str] = ()) -> Tensor:
        """Compute the logits (N, V) of hidden states (N, D), each row with the adapter named for it in `adapters`
        (empty: the adapter that the model uses at present)."""
        with self.using(adapters):
            return self.model.logits(hidden[None])[0]

    def follows(self, requests: Sequence[Request], starts: Sequence[int]) -> bool:
        """Return whether the tokens kept on the device are the inputs of this decoding step: the requests are those of
        the last step, and each of their positions in `starts` is one higher. If so, also advances the positions kept on
        the device."""
        if self.decoding != list(requests) or self.sampled_for != self.decoding:
            return False
        if any(start != before + 1 for start, before in zip(starts, self.starts)):
            return False
        self.positions += 1
        return True
