"""Batches of examples for fine-tuning: rows that hold one or more complete examples; no sequence attends to another.

Shapes: B rows, T tokens per row, S sequences and M examples in a batch.
"""

import json
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from onward.base.arguments import named
from onward.base.device import known_device
from onward.data.examples import Examples
from onward.data.windows import IGNORE_INDEX, Batch, hashed, permuted


@named
@dataclass(frozen=True)
class ExampleBatch(Batch):
    """Rows of complete examples. Sequences are numbered within the batch; the sequences of an example have consecutive
    numbers."""

    # number of the sequence to which each token belongs; 0 for padding
    sequences: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))  # (B, T)
    num_sequences: int = 0  # S
    lasts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # (S,), see `batch_of`
    numbers: Mapping[str, Tensor] = field(default_factory=dict)  # numbers of each example, (M,) each
    num_examples: int = 0  # M
    columns: Sequence[str] = ()  # (M,), `Example.columns` of each example; () if all are empty
    by_example: bool = False  # whether the loss is a mean over examples instead of targets

    @property
    def divisor(self) -> int:
        """The number of examples if `by_example` is set, else the number of targets."""
        return self.num_examples if self.by_example else self.num_targets

    def to(self, device: torch.device | str) -> Self:
        """Return the batch with all tensors on another device."""
        device = known_device(device)
        return super().to(device).changed(numbers={name: v.to(device) for name, v in self.numbers.items()})


def columns_of(batch: Batch) -> list[dict[str, Any]]:
    """The fields of each row's record besides the prompt, which rewards read; {} for a row without fields."""
    columns = batch.columns if isinstance(batch, ExampleBatch) else ()
    return [json.loads(text or "{}") for text in columns] or [{} for _ in batch.tokens]


class PackedExamples:
    """The rows of examples that a fine-tuning run reads, epoch after epoch; row i is a pure function of the seed and i.

    An epoch contains every row once, in random order. If the seed is None, there is one epoch, in the order of `rows`.
    With `packed`, the examples of a row have at most `length` tokens times the number of sequences per example in
    total; otherwise, a row holds one example. `by_example`: the loss is a mean over examples, not over targets.
    """

    def __init__(
        self,
        examples: Examples,
        length: int,
        seed: int | None,
        *,
        packed: bool = True,
        by_example: bool = False,
        chosen: Sequence[int] | None = None,
    ) -> None:
        chosen = range(len(examples)) if chosen is None else chosen
        self.examples, self.seed, self.by_example = examples, seed, by_example
        lengths = examples.lengths[list(chosen)].tolist()
        room = length * examples.per_example
        rows = best_fit(lengths, room) if packed else [[i] for i in range(len(lengths))]
        self.rows = [[chosen[i] for i in row] for row in rows]
        self.num_tokens = sum(lengths)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: Sequence[int]) -> ExampleBatch:
        """Rows by number, padded to the longest; with a seed, numbers continue beyond the first epoch."""
        batch = batch_of(self.examples, self.examples_of(numbers), self.by_example)
        return batch.changed(seed=((self.seed or 0) * 1_000_003 + numbers[0]) % 2**63)

    def examples_of(self, numbers: Sequence[int]) -> list[list[int]]:
        if self.seed is None:
            order = np.array(numbers)
        else:
            epoch, number = np.divmod(np.array(numbers, np.uint64), np.uint64(len(self)))
            key = hashed(self.seed % 2**64, epoch)
            order = permuted(number, np.full_like(number, len(self)), key).astype(np.int64)
        return [self.rows[i] for i in order.tolist()]


def batch_of(examples: Examples, rows: Sequence[Sequence[int]], by_example: bool = False) -> ExampleBatch:
    """Build a batch; `rows` contains the indices of each row's examples. Positions restart at each sequence, so no
    sequence attends to another; each padding token is a separate sequence.

    `lasts` are the indices, in the tokens flattened to (B * T), of each sequence's last trained token, or of its last
    token if none is trained."""
    k, starts = examples.per_example, examples.starts
    spans = [[(int(starts[s]), int(examples.ends[s])) for e in row for s in range(e * k, e * k + k)] for row in rows]
    width = max(sum(b - a for a, b in row) for row in spans)
    shape = len(rows), width
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    targets, sequences = np.full(shape, IGNORE_INDEX), np.zeros(shape, np.int64)
    lasts: list[int] = []
    for row, row_spans in enumerate(spans):
        at = 0
        for start, end in row_spans:
            here = slice(at, at + end - start)
            tokens[row, here], positions[row, here] = examples.tokens[start:end], np.arange(end - start)
            following, sequences[row, here] = tokens[row, at + 1 : here.stop], len(lasts)
            targets[row, at : here.stop - 1] = np.where(examples.trained[start + 1 : end], following, IGNORE_INDEX)
            trained = np.flatnonzero(examples.trained[start:end])
            lasts.append(row * width + (at + int(trained[-1]) if len(trained) else here.stop - 1))
            at = here.stop
    chosen = [e for row in rows for e in row]
    tensors: dict[str, Any] = {name: torch.from_numpy(v[chosen]) for name, v in examples.numbers.items()}
    return ExampleBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        torch.from_numpy(positions),
        sequences=torch.from_numpy(sequences),
        num_sequences=len(lasts),
        lasts=torch.tensor(lasts),
        numbers=tensors,
        num_examples=len(chosen),
        columns=[examples.columns[e] for e in chosen] if examples.columns else (),
        by_example=by_example,
    )


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack examples into rows of `room` tokens, longest first, each into the fullest row in which it fits."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = defaultdict(list)  # rows by number of free tokens
    rooms: list[int] = []  # the keys of `by_room` with rows, in ascending order
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, lengths[i])
        if at < len(rooms):
            left = rooms[at]
            row = by_room[left].pop()
            if not by_room[left]:
                del rooms[at]
            rows[row].append(i)
        else:
            left, row = room, len(rows)
            rows.append([i])
        left -= lengths[i]
        if not by_room[left]:
            insort(rooms, left)
        by_room[left].append(row)
    return rows
