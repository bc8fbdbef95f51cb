"""Beam search: checks of its prompts, and the cache rows on which it calls the model.

Shapes: B rows, D d_model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from onward.generation.cache.manager import CHUNK, growing_cache
from onward.generation.cache.rotations import last_length
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
    """The `rows` rows of a growing cache that hold the texts of a beam search, each of at most `length` tokens, and the
    runner that calls the model on them."""

    def __init__(self, model: Decoder, rows: int, length: int) -> None:
        self.manager = growing_cache(model, rows, length, min(CHUNK, length))
        self.runner, self.length = Runner(model, self.manager.cache), length
        self.cached = [0] * rows  # number of cached tokens of each row
        self.last_lengths = [0] * rows  # length to which each row can grow, see `last_length`

    def read(self, texts: Sequence[list[int]]) -> Tensor:
        """Run the model on the tokens of texts[i] that are not cached in row i (there must be at least one); return the
        hidden states (B, D) of the last token of each text."""
        for row, text in enumerate(texts):
            if len(text) > self.last_lengths[row]:
                self.manager.allocate(row, text, len(text))
                self.cached[row] = 0
                self.last_lengths[row] = last_length(self.manager.cache.config, len(text), self.length)
        last: list[Tensor | None] = [None] * len(texts)
        while any(state is None for state in last):
            idle = [row for row, state in enumerate(last) if state is not None]
            starts = [min(cached, self.length - 1) for cached, _ in zip(self.cached, texts)]
            pieces = [text[start:][: self.manager.cache.chunk] or text[-1:] for start, text in zip(starts, texts)]
            for row, (piece, start) in enumerate(zip(pieces, starts)):
                self.manager.reserve(row, start, start + len(piece))
            hidden = self.runner.forward_rows(0, pieces, starts, idle=idle)
            for row in {*range(len(texts))} - {*idle}:
                self.cached[row] = starts[row] + len(pieces[row])
                if self.cached[row] == len(texts[row]):
                    last[row] = hidden[row, len(pieces[row]) - 1]
        return torch.stack([state for state in last if state is not None])

    def reorder(self, index: Sequence[int]) -> None:
        """Copy row index[i] to row i for every i."""
        self.manager.reorder(index)
        self.cached[: len(index)] = [self.cached[row] for row in index]
        self.last_lengths[: len(index)] = [self.last_lengths[row] for row in index]
