"""Names of tensors in files whose rotary positions pair neighboring elements of a head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from onward.config.decoder import DecoderConfig
from onward.families._interface import Fix, Row
from onward.families._rope import a_rotary

if TYPE_CHECKING:
    from torch import Tensor


def interleaved(d_head: int, rope_dim: int, start: int = 0) -> Fix:
    """Return a pair of functions that reorder the rows of query and key projections: from files whose rotary positions
    pair elements 2 i and 2 i + 1 of a head (GPT-J, RoFormer) to Onward's pairs i and i + rope_dim / 2, and back.

    The `rope_dim` rotated elements of each head begin at element `start`. Weights are (H * d_head, D), biases (H *
    d_head). Reordering does not change the attention scores.
    """
    end = start + rope_dim
    order = [*range(start), *range(start, end, 2), *range(start + 1, end, 2), *range(end, d_head)]
    back = sorted(range(d_head), key=order.__getitem__)

    def reorder(t: Tensor, rows: list[int]) -> Tensor:
        if t.is_meta:  # the shape is unchanged, and indexing on the meta device would import modules for half a second
            return t
        import torch

        return t.unflatten(0, (-1, d_head)).index_select(1, torch.tensor(rows, device=t.device)).flatten(0, 1)

    return lambda t: reorder(t, order), lambda t: reorder(t, back)


def neighbor_names(c: DecoderConfig, names: Iterable[Row]) -> Iterator[Row]:
    """Rows of a name mapping with the projections of queries and keys reordered (see `interleaved`)."""
    turned = interleaved(c.d_head, a_rotary(c).rope_dim(c.d_head))
    for their, our, *_ in names:
        rotated = str(our).rpartition(".")[0].endswith(("attn.q", "attn.k"))
        yield (their, our, turned) if rotated else (their, our)
