"""Hidden states of completions; those of a prompt that several completions share are computed only once.

Shapes: N completions, T tokens of each, R rows that share prompts, S tokens of such a row, M targets, D d_model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from onward.base.own import own_parts
from onward.config.part_types import each
from onward.data.windows import IGNORE_INDEX, Batch
from onward.model.decoder import Decoder


def target_states(model: Decoder, batch: Batch) -> Tensor:
    """Return the hidden states (M, D) at the M targets of a batch of completions, row by row. If the model supports it
    and it takes fewer operations, consecutive completions of one prompt share a row that contains the prompt once; each
    attends only to the prompt and itself. The states are equal up to rounding."""
    inside = batch.targets != IGNORE_INDEX
    c = model.config
    # recurrent states cannot branch; custom parts may have states
    has_states = any(part.states(c) for part in each(c.attention))
    shares = batch.positions is None and not has_states and not own_parts(c)
    shared = shared_rows(batch, c.d_model) if shares else None
    if shared is None:
        return model.hidden(batch.tokens, batch.positions)[inside]
    return model.hidden(shared.tokens, shared.positions).flatten(0, 1)[shared.indices[inside]]


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The input of a model that computes a prompt once for several of its completions: each row contains a prompt and
    these completions."""

    tokens: Tensor  # (R, S)
    positions: Tensor  # (R, S)
    indices: Tensor  # (N, T), index of each completion token in the flattened rows


def shared_rows(batch: Batch, width: int) -> SharedRows | None:
    """Return the completions of a batch arranged in rows that share prompts, for a model with d_model `width`; None if
    sharing prompts saves no work."""
    inside = batch.targets != IGNORE_INDEX
    starts = (inside.int().argmax(1) + 1).tolist()  # index in each row where the completion starts
    ends = (inside.size(1) - inside.flip(1).int().argmax(1)).tolist()
    texts = batch.tokens.tolist()
    parts = list[list[int]]()
    for prompt, group in groupby(range(len(texts)), lambda n: texts[n][: starts[n]]):
        numbers = list(group)
        size = branches(len(prompt), max(ends[n] - starts[n] for n in numbers), width)
        count = math.ceil(len(numbers) / size)
        parts += [numbers[i * len(numbers) // count : (i + 1) * len(numbers) // count] for i in range(count)]
    if len(parts) == len(texts):
        return None
    longest = max(starts[part[0]] + sum(ends[n] - starts[n] for n in part) for part in parts)
    # one token at the batch's last position, so that RoPE scaling, which depends on the length, stays unchanged
    longest += 1
    tokens, positions = batch.tokens.new_zeros(2, len(parts), longest)
    positions[:, -1] = batch.tokens.size(1) - 1
    indices = torch.zeros_like(batch.tokens)
    for row, part in enumerate(parts):
        start = end = starts[part[0]]
        tokens[row, :start] = batch.tokens[part[0], :start]
        positions[row, :start] = torch.arange(start)
        for n in part:
            here = slice(end, end := end + ends[n] - start)
            tokens[row, here] = batch.tokens[n, start : ends[n]]
            positions[row, here] = torch.arange(start, ends[n])
            indices[n, :start] = torch.arange(start) + row * longest
            indices[n, start : ends[n]] = torch.arange(here.start, here.stop) + row * longest
    return SharedRows(tokens, positions, indices)


def branches(prompt: int, completion: int, width: int) -> int:
    """Return the number g of completions of `completion` tokens that should share a row with their prompt of `prompt`
    tokens, so that the operations per completion are minimal in a model with d_model `width`.

    With a prompt of L and completions of C tokens a row has S = L + g C. The matrix products of a layer with its
    weights take about 24 S D^2 operations, and attention takes 4 S^2 D, including masked scores; the sum divided by g
    is least for g = sqrt(L (L + 6 D)) / C.
    """
    return max(1, int(math.sqrt(prompt * (prompt + 6 * width)) / max(1, completion)))
