"""The runner: builds the input tensors of a step, and calls the model on rows of a cache.

Shapes: B rows, T tokens in one call, N hidden states, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from onward.base.device import tensor_on
from onward.compiled.interface import Step, decoding_step, hidden_step
from onward.compiled.model_state import ModelState
from onward.compiled.steps import CompiledSteps
from onward.generation.cache.manager import BUCKET
from onward.generation.compiled_prompts import TILE, prefill
from onward.generation.request import Request
from onward.kernels.operations import max_rows
from onward.model.adapters import Selection, adapter_names, check_adapter, selection
from onward.model.attachments import ATTACHMENTS
from onward.model.cache import CacheView, KVCache
from onward.model.decoder import Decoder

MAX_VIEWS = 64  # maximum number of cached views
Pieces = Sequence[Sequence[int]]  # tokens of each row
COMPILE_AFTER = 16  # plain steps of a kind before a step is compiled
MAX_PROMPT = 128  # maximum number of tokens, with padding, of all prompts in a compiled step
PLAIN_STEPS: WeakKeyDictionary[Decoder, Counter[tuple[object, ...]]] = WeakKeyDictionary()  # counts by kind


class Runner:
    """Calls a model on rows of a KV cache. With the model's `state`, a decoding step, or on a CPU a prefill of short
    prompts, is compiled after `compile_after` plain ones (None: never) of about the same shape.

    Views of the cache are reused in later steps with the same range of rows and rounded length, except views with
    `counts`. While the same rows decode, sampled tokens and positions stay on the device: the next step needs no copy
    from the host.
    """

    compiled_step: Step = staticmethod(decoding_step)  # the functions that are compiled
    prompt_step: Step = staticmethod(hidden_step)

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        state: ModelState | None = None,
        compile_after: int | None = COMPILE_AFTER,
    ) -> None:
        self.model, self.cache, self.state = model, cache, state
        self.compile_after = None if state is None else compile_after
        self.compiled: CompiledSteps | None = None  # created when the first step is compiled
        can_pad = model.device.type == "cpu" and not cache.states  # padding would change recurrent states
        self.max_prompt = min(MAX_PROMPT, max_rows(model.dtype)) if can_pad else 0
        self.num_plain, self.capacity = PLAIN_STEPS.setdefault(model, Counter()), cache.capacity
        self.views: dict[tuple[int, int, int], CacheView] = {}
        self.decoding: list[Request] = []  # the requests of the last call of `decode`
        self.starts: list[int] = []  # the positions of their last tokens
        self.sampled_for: list[Request] = []  # the requests of the tokens in `sampled`
        self.version, self.known = 0, list[str]()  # version of the model's attachments, names of its adapters
        self.selection: Selection | None = None  # None while the model has no adapters
        self.positions = self.sampled = torch.empty(0)  # on the device, (B,): `starts`, sampled tokens

    def view(self, first: int, end: int, length: int, counts: Sequence[int] = ()) -> CacheView:
        """Return a view of rows `first` to `end` - 1 of the cache, for attention over positions below `length`, rounded
        up so that views can be reused. Only the first counts[i] tokens of row i change its recurrent states; all tokens
        do if `counts` is empty."""
        if self.capacity != self.cache.capacity:  # a cache that has grown has new tensors
            self.views.clear()
            self.capacity = self.cache.capacity
        key = first, end, -(-length // BUCKET) * BUCKET
        if counts and self.cache.states:
            return self.cache.view(*key, counts=tensor_on(self.model.device, counts))
        if key not in self.views:
            if len(self.views) >= MAX_VIEWS:
                self.views.clear()
            self.views[key] = self.cache.view(*key)
        return self.views[key]

    def adapter(self, name: str | None) -> str:
        """Return the name of the LoRA adapter that a request uses: `name` or, for None, the adapter that the model
        currently uses. Raises a UserError if the model has no adapter `name`."""
        attached = vars(self.model).get(ATTACHMENTS)
        if attached and attached.version != self.version:
            self.version, self.known = attached.version, adapter_names(self.model)
            self.selection = selection(self.model) if self.known else None
        if name is None:
            return self.selection.current.name if self.selection else ""
        check_adapter(name, self.known)
        return name

    def using(self, adapters: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context manager in which the model applies to each row the adapter named in `adapters`; if
        `adapters` is empty, the adapter that the model currently uses."""
        return self.selection.use(adapters) if self.selection and adapters else nullcontext()

    def forward_rows(
        self, first: int, pieces: Pieces, starts: Sequence[int], adapters: Sequence[str] = (), idle: Sequence[int] = ()
    ) -> Tensor:
        """Run the model on `pieces`, the next tokens of each row from row `first` on; piece i begins at position
        starts[i]. Returns the hidden states (B, T, D). `adapters` names the adapter of each row; empty: the adapter
        that the model currently uses. The pieces with the indices `idle` are padding and do not change the recurrent
        states of their rows."""
        width, lengths = max(map(len, pieces)), [0 if i in idle else len(piece) for i, piece in enumerate(pieces)]
        # padding repeats a row's own last token: NaN from a token never reaches another row
        tokens, positions = self.inputs([[*piece, *[piece[-1]] * (width - len(piece))] for piece in pieces], starts)
        view = self.view(first, first + len(pieces), max(starts) + width, lengths if min(lengths) < width else ())
        with self.using(adapters):
            return self.model.hidden(tokens, positions, view)

    def prefill(self, first: int, pieces: Pieces, starts: Sequence[int], adapters: Sequence[str] = ()) -> Tensor:
        """Compute `forward_rows`, by a compiled step if the pieces are short; the next call overwrites the result."""
        width = -(-max(map(len, pieces)) // TILE) * TILE
        if len(pieces) * width <= self.max_prompt:
            with self.using(adapters):
                steps = self.compiled_steps(self.prompt_step, len(pieces), width)
                if steps and (hidden := prefill(steps, self.prompt_step, first, pieces, starts, width)) is not None:
                    return hidden
        return self.forward_rows(first, pieces, starts, adapters)

    def inputs(self, pieces: Pieces, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        width, device = len(pieces[0]), self.model.device
        return tensor_on(device, pieces), tensor_on(device, np.add.outer(starts, np.arange(width)))

    def decode(self, requests: Sequence[Request]) -> Tensor:
        """Run the model on the last token of each request; return the logits (B, V) after these tokens. Request i is
        in row i of the cache."""
        starts, adapters = [request.num_cached for request in requests], [r.adapter or "" for r in requests]
        if not self.follows(requests, starts):
            device = self.model.device
            self.sampled = tensor_on(device, [request.last_token for request in requests])
            self.positions = tensor_on(device, starts)
        self.decoding, self.starts = list(requests), starts
        tokens, positions, length = self.sampled[:, None], self.positions[:, None], max(starts) + 1
        with self.using(adapters):
            if (logits := self.run_compiled(tokens, positions, length)) is not None:
                return logits[:, 0]
            hidden = self.model.hidden(tokens, positions, self.view(0, len(requests), length))
            return self.model.logits(hidden.flatten(0, 1)[None])[0]

    def run_compiled(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor | None:
        """Compute the logits (B, T, V) for tokens (B, T) at positions (B, T), all below `length`, by a compiled step.
        Returns None if the caller must run a plain step."""
        steps = self.compiled_steps(self.compiled_step, tokens.size(0), min(tokens.size(1), 2))
        return steps.run(self.compiled_step, tokens, positions, length) if steps else None

    def compiled_steps(self, step: Step, rows: int, tokens: int) -> CompiledSteps | None:
        """Return the compiled steps, or None for the first `compile_after` steps of this kind."""
        if self.compile_after is None or self.state is None:
            return None
        kind = self.kind(step, rows, tokens)
        if self.num_plain[kind] < self.compile_after:
            self.num_plain[kind] += 1
            return None
        self.compiled = self.compiled or CompiledSteps(self.model, self.cache, self.state)
        return self.compiled

    def kind(self, step: Step, rows: int, tokens: int) -> tuple[object, ...]:
        return step, rows, tokens, *(self.selection.current.in_use if self.selection else ())

    def logits(self, hidden: Tensor, adapters: Sequence[str] = ()) -> Tensor:
        """Compute the logits (N, V) of hidden states (N, D), each row with its adapter named in `adapters` (empty: the
        adapter that the model currently uses)."""
        with self.using(adapters):
            return self.model.logits(hidden[None])[0]

    def keep(self, requests: Sequence[Request], sampled: Tensor) -> None:
        """Keep the tokens (B,) that were sampled for these requests on the device, as inputs of the next `decode`."""
        self.sampled_for, self.sampled = list(requests), sampled

    def follows(self, requests: Sequence[Request], starts: Sequence[int]) -> bool:
        """Return whether the tokens kept on the device are the inputs of this decoding step: the requests are the same
        as in the last step, and their positions, `starts`, are one higher. If so, also advances the positions kept on
        the device."""
        if self.decoding != list(requests) or self.sampled_for != self.decoding:
            return False
        if any(start != before + 1 for start, before in zip(starts, self.starts)):
            return False
        self.positions += 1
        return True
