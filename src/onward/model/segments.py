"""Segments: the packed documents, and the branches of documents, in the rows of a batch.

Shapes: B rows, T tokens in this call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of the rows of a batch, each tensor (B, T): a segment begins where a position is not the previous
    one plus one.

    A segment that begins at position 0 is a packed document. One that begins at a position s > 0 is a branch of the
    nearest document before it: it continues the first s tokens of this document, as several completions of one prompt
    do.
    """

    ids: Tensor  # index of each token's segment
    documents: Tensor  # index of the first segment of the document that contains the segment
    starts: Tensor  # position where the segment begins

    @staticmethod
    def of(positions: Tensor) -> Segments:
        begins = torch.nn.functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
        ids = begins.cumsum(1) - 1
        indices = torch.arange(positions.size(1), device=positions.device)
        starts = positions.gather(1, torch.where(begins, indices, 0).cummax(1).values)
        documents = torch.where(begins & (positions == 0), ids, 0).cummax(1).values
        return Segments(ids, documents, starts)

    def part(self, start: int, end: int) -> Segments:
        return Segments(self.ids[:, start:end], self.documents[:, start:end], self.starts[:, start:end])

    def visible(self, query: tuple[Any, ...], key_ids: Tensor, key_positions: Tensor) -> Tensor:
        """Return whether tokens at the indices `query` may attend to tokens of the segments `key_ids`, at the positions
        `key_positions`: both are in the same segment, or the key is in the prefix that the query's branch continues.
        Windows and causality are not considered."""
        same = self.ids[query] == key_ids
        return same | (self.documents[query] == key_ids) & (key_positions < self.starts[query])
