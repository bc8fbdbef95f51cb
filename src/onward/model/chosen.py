"""The mask of sparse attention: each query attends only to the keys chosen for it.

Shapes: B batch, T tokens in this call, S keys, K key/value heads, E d_head, C chosen keys.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from onward.model.layer_cache import Keys, to_tensor
from onward.model.mask import ALL, AttentionMask


class ChosenMask(AttentionMask):
    """A mask in which a query sees only the chosen keys: those at `indices` (B, T, C), where `chosen` (B, T, S) is
    true."""

    indices: Tensor
    chosen: Tensor

    @staticmethod
    def of(plain: AttentionMask, indices: Tensor) -> ChosenMask:
        """Return the mask of the keys at `indices` (B, T, C)."""
        mask: ChosenMask = copy(plain)  # type: ignore[assignment]
        mask.__class__ = ChosenMask
        chosen = indices.new_zeros(*indices.shape[:2], plain.key_positions.size(1), dtype=torch.bool)
        mask.indices, mask.chosen = indices, chosen.scatter_(-1, indices, True)
        mask.plain = mask.causal_only = False
        mask.biases, mask.parts = {}, {}
        return mask

    @property
    def linear(self) -> bool:
        return False

    def gathered(self, dtype: torch.dtype, *keys: Keys) -> tuple[list[Tensor], AttentionMask]:
        """Gather the chosen keys of each row from `keys` (B, S, K, E) in a cache, for one query per row; return them
        and their mask."""
        rows = self.indices[:, 0]
        positions = self.key_positions.expand(len(rows), -1).gather(1, rows)
        return [take(to_tensor(one, dtype), rows) for one in keys], AttentionMask(self.query_positions, positions)

    def visible(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        return super().visible(queries, keys) & self.chosen[:, queries, keys]


def take(keys: Tensor, indices: Tensor) -> Tensor:
    return keys.gather(1, indices[..., None, None].expand(-1, -1, *keys.shape[2:]))
