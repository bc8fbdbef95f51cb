"""Work that runs a model outside the engine: generators that give way to decoding after each piece; long texts are read
in pieces of at most CHUNK tokens.

Shapes: T tokens of a piece, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from onward.base.device import tensor_on
from onward.generation.cache.manager import CHUNK, growing_cache
from onward.generation.logprobs import TokenLogprob, token_logprobs
from onward.generation.runner import Runner
from onward.model.decoder import Decoder, without_dropout
from onward.serving.models import Served
from onward.transforms.lora import use_adapter

T = TypeVar("T")
POSITIONS = 128  # number of positions whose logits are computed at a time


def whole(served: Served, function: Callable[[], T]) -> Generator[None, None, T]:
    """Call a function as one piece, with the adapter of `served`, without gradients or dropout."""
    with use_adapter(served.lm.model, served.adapter), torch.no_grad(), without_dropout(served.lm.model):
        return function()
    yield


def hidden_states(model: Decoder, tokens: Sequence[int]) -> Iterator[Tensor]:
    """Hidden states (T, D) of a text, piece by piece; a text of several pieces is read through a cache."""
    if len(tokens) <= CHUNK:
        yield model.hidden(tensor_on(model.device, [list(tokens)]))[0]
        return
    manager = growing_cache(model, 1, len(tokens), CHUNK)
    manager.allocate(0, tokens, len(tokens))
    runner = Runner(model, manager.cache)
    for start in range(0, len(tokens), CHUNK):
        piece = tokens[start : start + CHUNK]
        manager.reserve(0, start, start + len(piece))
        yield runner.forward_rows(0, [piece], [start])[0]


def in_pieces(served: Served, pieces: Iterator[T]) -> Generator[None, None, list[T]]:
    """All items of an iterator that runs a served model, each of them a piece of work."""
    result: list[T] = []
    while True:
        with use_adapter(served.lm.model, served.adapter), torch.inference_mode(), without_dropout(served.lm.model):
            try:
                result.append(next(pieces))
            except StopIteration:
                return result
        yield


def embedding(served: Served, tokens: Sequence[int]) -> Generator[None, None, list[float]]:
    """The mean of a text's last hidden states (D,), in fp32."""
    sums = (hidden.float().sum(0) for hidden in hidden_states(served.lm.model, tokens))
    total = torch.stack((yield from in_pieces(served, sums))).sum(0)
    vector: list[float] = (total / len(tokens)).tolist()
    return vector


def scores(served: Served, tokens: Sequence[int], count: int) -> Generator[None, None, list[TokenLogprob]]:
    """The log-probability of each token of a text after the first, with the `count` likeliest tokens at its place."""
    model = served.lm.model

    def scored() -> Iterator[list[TokenLogprob]]:
        start = 1  # index of the token that the next hidden state predicts
        for hidden in hidden_states(model, tokens):
            for first, end in pairwise([*range(0, len(hidden), POSITIONS), len(hidden)]):
                after = tokens[start + first : start + end]
                logits = model.logits(hidden[None, first : first + len(after)])[0] if after else hidden[:0]
                yield token_logprobs(logits, after, count) if after else []
            start += len(hidden)

    return [one for piece in (yield from in_pieces(served, scored())) for one in piece]
