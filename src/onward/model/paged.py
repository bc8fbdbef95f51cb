"""The paged KV cache: blocks of slots, and block tables of the rows (PagedAttention, Kwon et al. 2023).

The BlockManager in `generation/cache/blocks.py` assigns blocks to rows.

Shapes: B rows, T tokens in this call, S slots, P blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from onward.base.arguments import checked
from onward.base.device import known_device
from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig
from onward.config.ranges import Size, SizeOrZero
from onward.model.cache import KVCache, empty_entries, kept_by, row_states
from onward.model.layer_cache import LayerCache, SlotIndices

NULL_BLOCK = 0  # the entry of a block table where a row has no block; the null block holds zeros and is never written


@dataclass(frozen=True, eq=False)
class PagedLayerCache(LayerCache):
    """The paged KV cache of one layer: entries (blocks, block size, ...), and the block table (B, P), which lists the
    numbers of the blocks of each row.

    Padding beyond the blocks of a row is written to the last block, which is in no table and thus never read.
    """

    table: Tensor = field(kw_only=True)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.table.gather(1, positions // self.slots), positions % self.slots

    def slot_indices(self, positions: Tensor) -> SlotIndices:
        """Return the slots that a call of the model writes and reads; positions (B, T) are consecutive in each row.
        On a CPU, raises a UserError if a row has no block for its first position."""
        block, slot = self.locate(positions)
        size, table = self.slots, self.table
        if positions.device.type == "cpu" and (missing := positions[block[:, 0] == NULL_BLOCK, 0]).numel():
            raise UserError(f"a row has no block for position {int(missing[0])}: reserve it before the call")
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
    """The largest number of blocks of `size` positions that `positions` consecutive positions can span."""
    return (positions - 2) // size + 2


def max_blocks(window: int, size: int, chunk: int, columns: int) -> int:
    """The largest number of blocks that a row can use at once. Without a window: all `columns` of the block table; with
    a window: the blocks that one query attends to plus those of up to `chunk` tokens of a call, at most `columns`."""
    return min(columns, -(-(window - 1) // size) - (-(size - 1 + chunk) // size)) if window else columns


class PagedKVCache(KVCache):
    """A KV cache of `blocks` blocks of `block_size` positions each, which are assigned to rows as they grow
    (PagedAttention, Kwon et al. 2023).

    Layers with the same window share one block table; window layers have at most as many blocks as the rows can use at
    once. A BlockManager must reserve blocks before every call. The positions of a row in one call are consecutive.
    States of recurrent layers are stored per row, as in a KVCache, not in blocks.
    """

    @checked
    @torch.inference_mode(False)
    def __init__(
        self,
        config: DecoderConfig,
        rows: Size,
        length: Size,
        chunk: SizeOrZero = 1,
        *,
        blocks: Size,
        block_size: Size = 16,
        keep: SizeOrZero = 0,
        quantized: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        device = known_device(device) if device else None
        self.config, self.length, self.capacity, self.chunk, self.step = config, length, length, chunk, 0
        self.block_size, self.keep = block_size, keep
        self.rope_length = torch.full((rows,), length, device=device)
        columns = -(-(length + chunk) // block_size)
        self.num_blocks: dict[int, int] = {}  # by window, not counting the null block and the padding block
        self.tables: dict[int, Tensor] = {}  # block tables (rows, P), by window
        self.layers, self.max_slots = [], []  # a paged cache does not grow
        for layer in (kept := kept_by(config)):
            window = layer.window
            if not layer.entries:
                self.layers.append(LayerCache({}, window))
                continue
            if window not in self.tables:
                limit = rows * max_blocks(window, block_size, chunk, columns) if window else blocks
                self.num_blocks[window] = min(blocks, limit)
                self.tables[window] = torch.full((rows, columns), NULL_BLOCK, device=device)
            size = self.num_blocks[window] + 2, block_size  # counting the null block and the padding block
            entries = empty_entries(layer.entries, size, quantized, device, dtype)
            self.layers.append(PagedLayerCache(entries, window, table=self.tables[window]))
        self.states = row_states(kept, rows, keep, device, dtype)

    def narrow(self, cache: LayerCache, rows: slice, slots: int) -> LayerCache:
        if not cache.entries:
            return cache
        table = self.tables[cache.window][rows, : -(-slots // self.block_size)]
        return PagedLayerCache(cache.entries, cache.window, table=table)
