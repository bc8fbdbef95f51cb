"""What the searches share: what they cannot do, and prompts that are read once into the rows of a cache.

Shapes: T tokens, D d_model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from onward.generation.engine import CHUNK, STEP
from onward.generation.request import Request, check
from onward.generation.sampling import Sampling
from onward.generation.speculation import feed
from onward.model.cache import Cache
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
    """A UserError for a prompt that cannot be continued with these options."""
    ids = frozenset(stop_token_ids)
    for prompt in prompts:
        request = Request(prompt, sampling, max_new_tokens, min_new_tokens=min_new_tokens, stop_token_ids=ids)
        check(request, model.config, model.config.context_length, slide=None)


def without(tokens: Collection[int], allowed: Tensor | None, like: Tensor) -> Tensor:
    """The mask `allowed` (V,), by default of all tokens of logits like (B, V), less some tokens."""
    mask = like.new_ones(like.size(-1), dtype=torch.bool) if allowed is None else allowed.clone()
    mask[list(tokens)] = False
    return mask


def read(model: Decoder, prompts: Sequence[list[int]], new: int, rows: int) -> tuple[Cache, list[list[Tensor]]]:
    """A cache of so many rows, with room for `new` tokens after each prompt, which holds prompt i in row i; and the
    hidden states of each prompt, in pieces (T, D)."""
    weight, longest = model.embed.weight, max(map(len, prompts))
    chunk = min(CHUNK, longest + new)
    cache = Cache(model.config, rows, longest + new, chunk, step=STEP, device=weight.device, dtype=weight.dtype)
    for row, prompt in enumerate(prompts):
        cache.open(row, prompt, len(prompt) + new)
    states: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, longest, chunk):
        starts = [min(start, len(prompt) - 1) for prompt in prompts]  # where one is read, its last token comes again
        pieces = [prompt[begin : start + chunk] for begin, prompt in zip(starts, prompts)]
        hidden = follow(model, cache, pieces, starts)
        for row, piece in enumerate(pieces):
            if start < len(prompts[row]):
                states[row].append(hidden[row, : len(piece)])
    return cache, states


def follow(model: Decoder, cache: Cache, pieces: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
    """`feed` for the first rows, once there is room."""
    for row, (piece, start) in enumerate(zip(pieces, starts)):
        cache.extend(row, start, start + len(piece))
    return feed(model, cache, 0, pieces, starts)
