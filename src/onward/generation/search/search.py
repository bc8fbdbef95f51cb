"""The rows of a beam search: checks of its prompts, and their prefill into the rows of a cache.

Shapes: T tokens, D d_model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from onward.generation.cache.manager import CHUNK, growing_cache
from onward.generation.check_request import check_request
from onward.generation.request import Request
from onward.generation.runner import Runner
from onward.generation.sampling import Sampling
from onward.model.decoder import Decoder

UNCHANGED = Sampling(temperature=1.0)  # the model's own probabilities


def check_prompts(
    model: Decoder,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    max_new_tokens: int,
    min_new_tokens: int,
    stop_token_ids: Collection[int],
) -> None:
    ids = frozenset(stop_token_ids)
    for prompt in prompts:
        request = Request(prompt, sampling, max_new_tokens, min_new_tokens=min_new_tokens, stop_token_ids=ids)
        check_request(request, model.config, model.config.context_length, slide=None)


def mask_without(tokens: Collection[int], allowed: Tensor | None, like: Tensor) -> Tensor:
    mask = like.new_ones(like.size(-1), dtype=torch.bool) if allowed is None else allowed.clone()
    mask[list(tokens)] = False
    return mask


class SearchRows:
    """The rows of a growing cache that hold the hypotheses of a beam search, and the runner that calls the model on
    them."""

    def __init__(self, model: Decoder, rows: int, length: int) -> None:
        self.manager = growing_cache(model, rows, length, min(CHUNK, length))
        self.runner = Runner(model, self.manager.cache)

    def forward(self, pieces: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        for row, (piece, start) in enumerate(zip(pieces, starts)):
            self.manager.reserve(row, start, start + len(piece))
        return self.runner.forward_rows(0, pieces, starts)


def prefill(model: Decoder, prompts: Sequence[list[int]], new: int, rows: int) -> tuple[SearchRows, list[list[Tensor]]]:
    """Run the model on each prompt and write prompt i to row i of a new cache of `rows` rows, with space for `new`
    tokens after each prompt. Returns the rows, and the hidden states of each prompt as a list of tensors (T, D), one
    per chunk."""
    longest = max(map(len, prompts))
    search = SearchRows(model, rows, longest + new)
    for row, prompt in enumerate(prompts):
        search.manager.allocate(row, prompt, len(prompt) + new)
    states: list[list[Tensor]] = [[] for _ in prompts]
    chunk = search.manager.cache.chunk
    for start in range(0, longest, chunk):
        starts = [min(start, len(prompt) - 1) for prompt in prompts]  # a prefilled prompt feeds its last token again
        pieces = [prompt[begin : start + chunk] for begin, prompt in zip(starts, prompts)]
        hidden = search.forward(pieces, starts)
        for row, piece in enumerate(pieces):
            if start < len(prompts[row]):
                states[row].append(hidden[row, : len(piece)])
    return search, states
