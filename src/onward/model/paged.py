"""Paged memory for keys and values: blocks of positions, and tables that say which blocks a row has (PagedAttention,
Kwon et al. 2023). Which row gets which block is decided by `generation/blocks.py`.

Shapes: B rows, T tokens in this call, S slots, P blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from onward.errors import UserError
from onward.model.cache import KVCache, LayerCache, SlotIndices, empty_entries
from onward.model.config import DecoderConfig, at

NULL_BLOCK = 0  # what a table holds where a row has no block: zeros, never written


@dataclass(frozen=True, eq=False)
class PagedLayerCache(LayerCache):
    """The entries of one layer, each (blocks, block size, ...), and a table (B, P) of the blocks of each row.

    Padding beyond the blocks of a row is written to the last block, which no table names: what a row writes by mistake
    or as NaN is never read by another.
    """

    table: Tensor = field(kw_only=True)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.table.gather(1, positions // self.slots), positions % self.slots

    def slot_indices(self, positions: Tensor) -> SlotIndices:
        """Where a call with positions (B, T), which follow one another in each row, writes, and what it reads."""
        block, slot = self.locate(positions)
        size, table = self.slots, self.table
        if positions.device.type == "cpu" and bool((block[:, 0] == NULL_BLOCK).any()):
            raise UserError(f"a row has no block for position {int(positions[:, 0].max())}: reserve it before the call")
        padding = next(iter(self.entries.values())).size(0) - 1
        write = torch.where(block == NULL_BLOCK, padding, block), slot
        slots = torch.arange(table.size(1) * size, device=positions.device)[None]
        reach = block_span(self.window + positions.size(1) - 1, size)
        if self.window and reach < table.size(1):
            first = (positions[:, :1] + 1 - self.window).clamp(min=0) // size
            first = first.clamp(max=table.size(1) - reach)
            table = table.gather(1, first + torch.arange(reach, device=first.device))
            slots = first * size + slots[:, : reach * size]
        return SlotIndices(write, slots, table)


def block_span(positions: int, size: int) -> int:
    """The most blocks of this size that this many consecutive positions lie in."""
    return (positions - 2) // size + 2


def max_blocks(window: int, size: int, chunk: int, columns: int) -> int:
    """The most blocks that a row holds in layers with a window: those seen from the beginning of a block on, and those
    of a chunk that begins in it."""
    return min(columns, -(-(window - 1) // size) - (-(size - 1 + chunk) // size)) if window else columns


class PagedKVCache(KVCache):
    """A cache whose memory is in `blocks` blocks of `block_size` positions, given to rows as they grow.

    Layers with the same window share one table of blocks; window layers have no more blocks than the rows can hold at
    once. A BlockManager assigns blocks, which must come before every call that writes. The tokens of a row in one call
    follow one another.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        config: DecoderConfig,
        rows: int,
        length: int,
        chunk: int = 1,
        *,
        blocks: int,
        block_size: int = 16,
        quantized: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config, self.length, self.capacity, self.chunk, self.step = config, length, length, chunk, 0
        self.block_size = block_size
        self.rope_length = torch.full((rows,), length, device=device)
        columns = -(-(length + chunk) // block_size)
        self.num_blocks: dict[int, int] = {}  # by window
        self.tables: dict[int, Tensor] = {}  # by window, (rows, P)
        self.layers = []
        for layer in range(config.n_layers):
            window = at(config.attention, layer).window
            if window not in self.tables:
                limit = rows * max_blocks(window, block_size, chunk, columns) if window else blocks
                self.num_blocks[window] = min(blocks, limit)
                self.tables[window] = torch.full((rows, columns), NULL_BLOCK, device=device)
            size = self.num_blocks[window] + 2, block_size  # with the null block and the one for padding
            entries = empty_entries(config, layer, size, quantized, device, dtype)
            self.layers.append(PagedLayerCache(entries, window, table=self.tables[window]))

    def narrow(self, cache: LayerCache, rows: slice, slots: int) -> LayerCache:
        table = self.tables[cache.window][rows, : -(-slots // self.block_size)]
        return PagedLayerCache(cache.entries, cache.window, table=table)
