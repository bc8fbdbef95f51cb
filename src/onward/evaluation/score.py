"""Compute log-probabilities, loss, perplexity and bits per byte of a model over token ids.

Shapes: B windows, T tokens.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TypeVar

import numpy as np
import torch

from onward.base.alone import ALONE, Alone
from onward.base.errors import UserError
from onward.data.tokens import Tokens
from onward.data.windows import IGNORE_INDEX
from onward.kernels.cross_entropy import cross_entropies
from onward.model.decoder import Decoder, check_ids, without_dropout

T = TypeVar("T")
LOGITS = 512  # number of positions whose logits are computed at a time


@torch.inference_mode()
def logprobs(model: Decoder, windows: np.ndarray, first: int = 1) -> np.ndarray:
    """Compute the log-probabilities, in nats, of the tokens from index `first` on in `windows`, token ids (B, T).

    Each token is predicted from the tokens before it in its window. Returns (B, T - first) in at least fp32. Raises a
    UserError for a token id outside the vocabulary, or a result that is not finite.
    """
    check_ids(int(windows.min()), int(windows.max()), model.config)
    ids = torch.as_tensor(windows.astype(np.int64), device=model.device)
    targets = ids[:, first:]
    with without_dropout(model):
        hidden = model.hidden(ids[:, :-1])[:, first - 1 :].flatten(0, 1)
        parts = zip(hidden.split(LOGITS), targets.flatten().split(LOGITS))
        losses = torch.cat([cross_entropies(model.logits(h[None])[0], t, IGNORE_INDEX) for h, t in parts])
    result = -losses.view_as(targets).cpu().numpy()
    if not np.isfinite(result).all():
        raise UserError(
            f"the model's log-probabilities are NaN or infinite (in {losses.dtype}, weights in {model.dtype}): check "
            "its weights and config.json, or load it in another dtype"
        )
    return result


TOGETHER = 4096  # maximum number of tokens per call


@dataclass(frozen=True)
class Evaluation:
    """The figures of a model on a text, such as its loss and perplexity."""

    loss: float  # mean negative log-probability per token, in nats
    perplexity: float  # exp(loss)
    bits_per_byte: float  # comparable across tokenizers
    tokens: int  # number of predicted tokens
    bytes: int  # number of bytes of the UTF-8 text of these tokens
    context_length: int
    stride: int  # number of tokens by which the window moves


def windows(count: int, context_length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, first, end) of each window over `count` tokens: tokens start to end - 1 are the input, and tokens
    first to end - 1 are predicted.

    Every token but the first of the text is predicted once, from at least context_length - stride preceding tokens, or
    from all if there are fewer."""
    first = 1
    while first < count:
        end = first + stride if first > 1 else context_length + 1
        yield max(0, end - context_length - 1), first, min(count, end)
        first = end


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Like itertools.batched of Python 3.12, but with lists."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def evaluate(
    model: Decoder, tokens: np.ndarray | Tokens, n_bytes: int, stride: int = 0, replicas: Alone = ALONE
) -> Evaluation:
    """Loss, perplexity and bits per byte of tokens (T,), with a window that advances by `stride` tokens.

    By default (0) windows do not overlap: the stride is the context length. With a smaller stride, tokens are predicted
    from more context, which takes longer. `n_bytes` is the number of bytes of the text without its first token, which
    is not predicted. The processes `replicas` divide the batches of windows."""
    length = model.config.context_length
    stride = stride or length
    if not isinstance(stride, int) or not 1 <= stride <= length:
        raise UserError(f"stride is {stride!r}: it must be from 1 to the context length, {length}")
    if len(tokens) < 2:
        raise UserError("the text has fewer than two tokens, so that no token can be predicted: give more text")

    def batches() -> Iterator[list[tuple[int, int, int]]]:
        """Yield groups of windows of the same shape, to read together."""
        for shape, spans in groupby(windows(len(tokens), length, stride), key=lambda s: (s[2] - s[0], s[1] - s[0])):
            yield from batched(spans, max(1, TOGETHER // shape[0]))

    def nats_of(batch: list[tuple[int, int, int]]) -> float:
        (start, first, _), *_ = batch
        stack = np.stack([tokens[start:end] for start, _, end in batch])
        return -math.fsum(logprobs(model, stack, first - start).flat)

    nats, count = math.fsum(replicas.map(f"the loss of {len(tokens):,} tokens", nats_of, batches())), len(tokens) - 1
    loss = nats / count
    return Evaluation(
        loss, math.exp(min(loss, 700)), nats / math.log(2) / max(1, n_bytes), count, n_bytes, length, stride
    )
