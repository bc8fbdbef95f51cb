"""Windows of tokens to train on: the tokens of window i, and batches of windows.

Shapes: B windows, T context_length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onward.base.arguments import checked, explained, named
from onward.base.device import known_device
from onward.base.errors import UserError
from onward.base.splitmix import GOLDEN, MULTIPLIERS
from onward.config.mixtures import MovingWeight
from onward.config.ranges import Size
from onward.data.curricula import interleaving
from onward.data.tokens import Tokens

Packing = Literal["stream", "documents"]
Numbers = NDArray[np.uint64]
IGNORE_INDEX = -100  # the target of a token that is not predicted; also the default of torch's cross_entropy
SHIFTING = 10  # minimum number of windows of a text whose epochs begin at different offsets


@named
@dataclass(frozen=True)
class Batch:
    """Windows of tokens for one forward and backward pass. Batches for fine-tuning are subclasses with more tensors."""

    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, T), next token of each position; IGNORE_INDEX if no token is predicted
    positions: Tensor | None = None  # (B, T), position of each token in its document; None: 0, 1, 2, ...
    seed: int = 0  # seed of the dropout
    loss_scale: float = 1.0  # factor of the loss in the backward pass; keeps gradients in the range of fp16

    @cached_property
    def num_targets(self) -> int:
        """The number of targets in the batch that are not IGNORE_INDEX."""
        return int((self.targets != IGNORE_INDEX).sum())

    @property
    def divisor(self) -> int:
        """The divisor that turns the summed loss of the batch into a mean: the number of targets."""
        return self.num_targets

    @explained
    def to(self, device: torch.device | str) -> Self:
        """Return the batch with all tensors on another device. Its targets are counted before the copy: on an
        accelerator counting would force a sync."""
        device = known_device(device)
        return self.changed(**{name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor)})

    def changed(self, **fields: Any) -> Self:
        """Return a copy of the batch with `fields` replaced, by name; the number of targets must stay the same."""
        batch = replace(self, **fields)
        vars(batch)["num_targets"] = self.num_targets
        return batch


class TrainingWindows(Protocol):
    """Training data: windows of tokens, or rows of examples, by number."""

    def __len__(self) -> int: ...  # number of windows in an epoch
    def read(self, numbers: Sequence[int]) -> Batch:
        """Windows by number, from 0; numbers continue beyond the first epoch."""


class HeldOutWindows(TrainingWindows, Protocol):
    """Validation data."""

    @property
    def num_tokens(self) -> int: ...


class Windows:
    """The windows of `context_length` tokens of a training run, epoch after epoch.

    Window i is a pure function of the seed and i, and needs no memory that grows with i. An epoch contains every window
    once, in random order, without overlap. A text in which n windows fit has n windows per epoch or, if n is at least
    SHIFTING, n - 1: each epoch then begins at a random offset, so that epochs leave out different targets.

    Without `weights` the sources are one text. With weights, one per source, each source has its own epochs. Constant
    weights give each source its share, in whole windows, of every 10,000 windows, evenly spread; other weights change
    over a run of `total` windows. With pack "documents", positions restart at 0 in each document and the last token of
    a document has no target, so that no token attends to another document; with "stream" the documents are one text.

    Raises a UserError if the weights do not fit the sources, or if a source is shorter than one window.
    """

    @checked
    def __init__(
        self,
        sources: Sequence[Tokens],
        context_length: Size,
        seed: int,
        *,
        weights: Sequence[float | MovingWeight] = (),
        total: Size = 1,
        pack: Packing = "stream",
    ) -> None:
        self.sources = sources if weights else [Tokens.join(sources)]
        self.length, self.seed, self.pack = context_length, seed, pack
        sizes = np.array([len(tokens) for tokens in self.sources])
        if (least := sizes.min()) <= context_length:
            raise UserError(
                f"{'a source' if weights else 'the text'} has {least} tokens, too few for a window of "
                f"{context_length + 1}: give it more text or a smaller --model.context-length"
            )
        fitting = (sizes - 1) // context_length
        counts = np.where(fitting < SHIFTING, fitting, fitting - 1)
        self.counts = counts.astype(np.uint64)
        self.room = (sizes - counts * context_length).astype(np.uint64)  # number of offsets at which an epoch can begin
        if len(weights or [1.0]) != len(self.sources):
            raise UserError(f"there are {len(weights)} weights for {len(self.sources)} sources: give one for each")
        self.mixture = interleaving(weights, total) if weights else None

    def __len__(self) -> int:
        """Return the number of windows in an epoch, of all sources."""
        return int(self.counts.sum())

    @explained
    def read(self, numbers: Sequence[int]) -> Batch:
        """Return the windows with these numbers as a batch; numbers continue beyond the first epoch. The batch's
        dropout seed is a function of the seed and the first number."""
        if not len(numbers):
            raise UserError("Cannot read a batch without windows: give at least one number")
        rank = np.array(numbers)
        source, rank = self.mixture.locate(rank) if self.mixture else (np.zeros_like(rank), rank)
        windows = self.counts[source]
        epoch, number = np.divmod(rank.astype(np.uint64), windows)
        key = hashed(self.seed % 2**64, source.astype(np.uint64), epoch)
        starts = hashed(key) % self.room[source] + permuted(number, windows, key) * self.length
        batch = cut([(self.sources[s], int(start)) for s, start in zip(source, starts)], self.length, self.pack)
        return replace(batch, seed=(self.seed * 1_000_003 + numbers[0]) % 2**63)


class ValidationWindows:
    """Windows of `context_length` tokens that cover a validation text without overlap: each token but the first is a
    target once."""

    @checked
    def __init__(self, tokens: Tokens, context_length: Size, pack: Packing = "stream") -> None:
        self.tokens, self.length, self.pack = tokens, context_length, pack

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the validation text."""
        return len(self.tokens)

    @explained
    def read(self, numbers: Sequence[int]) -> Batch:
        """Return the windows with these numbers as a batch; they are numbered in the order of the text."""
        return cut([(self.tokens, number * self.length) for number in numbers], self.length, self.pack)

    @checked
    def batches(self, size: Size) -> Iterator[Batch]:
        """Yield all windows in order, in batches of at most `size` windows; each batch is read when it is requested."""
        return (self.read(range(first, min(first + size, len(self)))) for first in range(0, len(self), size))


def cut(segments: Sequence[tuple[Tokens, int]], length: int, pack: Packing) -> Batch:
    """Return windows of `length` tokens that begin at each (text, index); beyond the end of a text, windows are padded
    with token 0 and the target IGNORE_INDEX."""
    tokens = np.zeros((len(segments), length), np.int64)
    targets = np.full((len(segments), length), IGNORE_INDEX)
    for row, (text, start) in enumerate(segments):
        window = text[start : start + length + 1]
        tokens[row, : len(window)] = window[:length]
        targets[row, : len(window) - 1] = window[1:]
    if pack == "stream":
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))
    begins = np.zeros((len(segments), length + 1), np.int64)  # the index in the window where a document begins, else 0
    for row, (text, start) in enumerate(segments):
        documents = text.starts(start, min(start + length + 1, len(text)))
        begins[row, documents] = documents
    targets[begins[:, 1:] > 0] = IGNORE_INDEX
    positions = np.arange(length) - np.maximum.accumulate(begins[:, :-1], axis=1)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(positions))


def hashed(*parts: Numbers | int) -> Numbers:
    """Return 64 random bits for each combination of the integers, broadcast, by SplitMix64 (Steele et al. 2014)."""
    x: Any = np.zeros(1, np.uint64)
    for part in parts:
        x = x + GOLDEN + part
        x = (x ^ (x >> 30)) * MULTIPLIERS[0]
        x = (x ^ (x >> 27)) * MULTIPLIERS[1]
        x = x ^ (x >> 31)
    return x


ROUNDS = 8  # with fewer, pairs of images of neighboring numbers in range(6) are not equally frequent


def permuted(x: Numbers, size: Numbers, key: Numbers) -> Numbers:
    """Return the image of `x`, elementwise, under a permutation of range(size) that `key` selects, without storing it.

    A Feistel network (Luby and Rackoff 1988) permutes a rectangle slightly larger than the range; a value outside of
    the range is permuted again until it is inside (cycle walking, Black and Rogaway 2002)."""
    width = np.ceil(np.sqrt(size)).astype(np.uint64)
    height = (size + width - 1) // width
    keys = hashed(key, np.arange(2 * ROUNDS, dtype=np.uint64).reshape(ROUNDS, 2, 1))
    outside = np.ones(x.shape, bool)
    while outside.any():
        row, column = np.divmod(x, width)
        for one, other in keys:
            row = (row + hashed(one + column)) % height
            column = (column + hashed(other + row)) % width
        x = np.where(outside, row * width + column, x)
        outside = x >= size
    return x
