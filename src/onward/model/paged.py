"""A cache in blocks, which rows get as they grow and share where they begin alike (PagedAttention, Kwon et al. 2023).

Shapes: B rows, T tokens in this call, S slots, P blocks of a row.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from onward.errors import UserError
from onward.model.cache import Cache, Place, Store, allocate, rotation_key
from onward.model.config import DecoderConfig, at

BIN = 0  # the block that takes what is not kept: pads beyond the blocks of a row


class PagedStore(Store):
    """What one layer keeps: tensors (blocks, block size, ...), in which a table (B, P) says where rows have theirs."""

    def __init__(self, entries: dict[str, Tensor], window: int, table: Tensor) -> None:
        super().__init__(entries, window, 0)
        self.table = table

    def index(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.table.gather(1, positions // self.slots), positions % self.slots

    def place(self, positions: Tensor) -> Place:
        """Where a call with positions (B, T), which follow one another in each row, writes and reads."""
        write, size, pages = self.index(positions), self.slots, self.table
        if positions.device.type == "cpu" and bool((write[0][:, 0] == BIN).any()):
            raise UserError(f"a row has no room at position {int(positions[:, 0].max())}: extend it before the call")
        slots = torch.arange(pages.size(1) * size, device=positions.device)[None]
        reach = span(self.window + positions.size(1) - 1, size)
        if self.window and reach < pages.size(1):
            first = (positions[:, :1] + 1 - self.window).clamp(min=0) // size
            first = first.clamp(max=pages.size(1) - reach)
            pages = pages.gather(1, first + torch.arange(reach, device=first.device))
            slots = first * size + slots[:, : reach * size]
        return Place(write, slots, pages)


def span(positions: int, size: int) -> int:
    """The most blocks of this size that so many positions lie in."""
    return (positions - 2) // size + 2


class Blocks:
    """Who holds which blocks, in the layers of one window (0: no window), and which tokens they are found by.

    A row holds a list of blocks, of which the first may be the bin: they were let go, being behind the window. A block
    is held by as many rows as `users` says. Those with none are free, but are found by their tokens until they are
    taken, those first that nothing finds, then those that have been free the longest.
    """

    def __init__(self, window: int, size: int, most: int, count: int, table: Tensor) -> None:
        self.window, self.size, self.most = window, size, most  # a row holds at most so many
        self.table = table  # (rows, P), BIN where a row has none
        self.held: list[list[int]] = [[] for _ in range(len(table))]  # the same without the bins at the end
        self.users = [0] * (count + 1)
        self.keys: list[bytes | None] = [None] * (count + 1)
        self.found: dict[bytes, int] = {}
        self.free = OrderedDict.fromkeys(range(1, count + 1))

    def first(self, start: int) -> int:
        """The first block that a query at position `start`, or a later one, sees."""
        return max(0, start - self.window + 1) // self.size if self.window else 0

    def beginning(self, keys: Sequence[bytes]) -> list[int]:
        """What a row holds that goes on from the tokens of these keys."""
        first = self.first(len(keys) * self.size)
        return [BIN] * first + [self.found[key] for key in keys[first:]]

    def take(self) -> int:
        """A free block."""
        block, _ = self.free.popitem(last=False)
        self.forget(block)
        self.users[block] = 1
        return block

    def share(self, block: int) -> int:
        """The same block, held once more."""
        if block != BIN:
            self.users[block] += 1
            self.free.pop(block, None)
        return block

    def release(self, block: int) -> None:
        """The block is held once less."""
        if block == BIN:
            return
        self.users[block] -= 1
        if not self.users[block]:
            self.free[block] = None
            if self.keys[block] is None:
                self.free.move_to_end(block, last=False)

    def forget(self, block: int) -> None:
        """The block is no longer found by its tokens."""
        key, self.keys[block] = self.keys[block], None
        if key is not None:
            del self.found[key]

    def remember(self, row: int, first: int, keys: Sequence[bytes]) -> None:
        """The blocks of a row, from the `first` on, hold the tokens of these keys."""
        for block, key in zip(self.held[row][first:], keys):
            if block != BIN and self.keys[block] is None and key not in self.found:
                self.keys[block], self.found[key] = key, block

    def give(self, row: int, blocks: list[int]) -> None:
        """A row holds these blocks, which have been counted, and no longer those it held."""
        old, self.held[row] = self.held[row], blocks
        self.table[row] = BIN
        self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.long)
        for block in reversed(old):  # so that beginnings are found the longest
            self.release(block)

    def fresh(self, row: int, start: int, end: int) -> list[int]:
        """Which blocks of a row have to be taken to write positions start to end - 1: missing or held by others too."""
        held = self.held[row]
        writes = range(start // self.size, -(-end // self.size))
        return [i for i in writes if i >= len(held) or self.users[held[i]] != 1]

    def gone(self, row: int, start: int, end: int) -> list[int]:
        """Which blocks of a row lie at `end` and beyond, or are not seen from the beginning of the block of `start`,
        from where others may go on that share what lies before."""
        held = self.held[row]
        gone = list(range(len(held) - 1, -(-end // self.size) - 1, -1))
        behind = self.first(start // self.size * self.size) - 1
        while behind >= 0 and held[behind] != BIN:
            gone.append(behind)
            behind -= 1
        return gone

    def has_room(self, row: int, start: int, end: int) -> bool:
        """Whether `extend` finds all blocks. A UserError where the row lacks what queries from `start` on see."""
        held, first = self.held[row], self.first(start)
        if start > len(held) * self.size or (start > first * self.size and held[first] == BIN):
            raise UserError(f"a row does not hold all that is seen from position {start}: open it again")
        let_go = sum(self.users[held[i]] == 1 for i in self.gone(row, start, end))
        return len(self.fresh(row, start, end)) <= len(self.free) + let_go

    def extend(self, row: int, start: int, end: int) -> tuple[int, int] | None:
        """Hold blocks of its own for positions start to end - 1; which block is to be copied to which, if any."""
        held, copied = self.held[row], None
        for i in self.gone(row, start, end):
            self.release(held[i])
            held[i] = self.table[row, i] = BIN
        del held[-(-end // self.size) :]
        for i in range(start // self.size, len(held)):
            if self.users[held[i]] == 1:
                self.forget(held[i])
        for i in self.fresh(row, start, end):
            block = self.take()
            if i < len(held):
                if i * self.size < start:
                    copied = held[i], block
                self.release(held[i])
                held[i] = block
            else:
                held.append(block)
            self.table[row, i] = block
        return copied


class PagedCache(Cache):
    """A cache whose memory is in `blocks` of `block_size` positions, taken by rows as they grow.

    Layers with the same window share one table of blocks; those of windows have no more blocks than the rows can hold
    at once. Blocks that hold the tokens a request begins with are shared by `open`, in every layer or not at all,
    after `commit` has told of them and until they are taken for others. A block that several rows hold is copied
    before one of them writes to it.

    `extend` lets go what a window has passed and what lies at `end` and beyond, and must come before every call that
    writes; so rows can be rolled back as far as the `start` of the last one. The tokens of a row in one call follow one
    another.
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
        self.config, self.length, self.room, self.chunk, self.block_size = config, length, length, chunk, block_size
        self.end = length + chunk
        self.rope_length = torch.full((rows,), length, device=device)
        columns = -(-self.end // block_size)
        self.groups: dict[int, Blocks] = {}  # by their windows
        self.layers: list[Store] = []
        for layer in range(config.n_layers):
            window = at(config.attention, layer).window
            if window not in self.groups:
                most, count = columns, blocks
                if window:  # what is seen from the beginning of a block on, and a chunk that begins in it
                    most = min(columns, -(-(window - 1) // block_size) - (-(block_size - 1 + chunk) // block_size))
                    count = min(blocks, rows * most)
                table = torch.zeros(rows, columns, dtype=torch.long, device=device)
                self.groups[window] = Blocks(window, block_size, most, count, table)
            group = self.groups[window]
            entries = allocate(config, layer, (len(group.users), block_size), quantized, device, dtype)
            self.layers.append(PagedStore(entries, window, group.table))
        self.tables = {window: group.table for window, group in self.groups.items()}
        self.keys = [[rotation_key(config, length)] for _ in range(rows)]  # of the blocks that were told of

    def open(self, row: int, tokens: Sequence[int], rope_length: int) -> int | None:
        self.close(row)
        keys = self.chain([rotation_key(self.config, rope_length)], tokens[:-1])
        found, groups = self.longest(keys[1:]), self.groups.values()
        beginnings = [group.beginning(keys[1 : 1 + found]) for group in groups]
        for group, blocks in zip(groups, beginnings):
            wanted = min(-(-len(tokens) // self.block_size), group.most + blocks.count(BIN)) - found
            if wanted > len(group.free) - sum(block in group.free for block in blocks):
                return None
        for group, blocks in zip(groups, beginnings):
            group.give(row, [group.share(block) for block in blocks])
        self.keys[row] = keys[: 1 + found]
        self.rope_length[row] = rope_length
        return found * self.block_size

    def longest(self, keys: Sequence[bytes]) -> int:
        """How many of the first blocks, by their keys, are found with all that their windows need."""
        found, runs = 0, dict.fromkeys(self.groups, 0)
        for n, key in enumerate(keys, 1):
            for window, group in self.groups.items():
                runs[window] = runs[window] + 1 if key in group.found else 0
            if all(runs[window] >= n - group.first(n * self.block_size) for window, group in self.groups.items()):
                found = n
        return found

    def extend(self, row: int, start: int, end: int) -> bool:
        if not all(group.has_room(row, start, end) for group in self.groups.values()):
            return False
        for window, group in self.groups.items():
            copied = group.extend(row, start, end)
            if copied:
                for store in self.layers:
                    if store.window == window:
                        for entry in store.entries.values():
                            entry[copied[1]] = entry[copied[0]]
        del self.keys[row][1 + start // self.block_size :]
        return True

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        known = len(self.keys[row])
        self.keys[row] = self.chain(self.keys[row], tokens)
        for group in self.groups.values():
            group.remember(row, known - 1, self.keys[row][known:])

    def chain(self, keys: list[bytes], tokens: Sequence[int]) -> list[bytes]:
        """The keys of whole blocks of tokens, each made from the one before, where the first `keys` are known."""
        keys = list(keys)
        for start in range((len(keys) - 1) * self.block_size, len(tokens) - self.block_size + 1, self.block_size):
            block = array("q", tokens[start : start + self.block_size]).tobytes()
            keys.append(hashlib.sha256(keys[-1] + block).digest())
        return keys

    def close(self, row: int) -> None:
        for group in self.groups.values():
            group.give(row, [])
        del self.keys[row][1:]

    def fork(self, source: int, target: int, length: int) -> None:
        for group in self.groups.values():
            group.give(target, [group.share(block) for block in group.held[source][: -(-length // self.block_size)]])
        self.keys[target] = self.keys[source][: 1 + length // self.block_size]
        self.rope_length[target] = self.rope_length[source]

    def move(self, source: int, target: int) -> None:
        self.fork(source, target, self.end)
        self.close(source)

    def reorder(self, index: Sequence[int]) -> None:
        for group in self.groups.values():
            rows = [[group.share(block) for block in group.held[i]] for i in index]
            for row, blocks in enumerate(rows):
                group.give(row, blocks)
        self.keys[: len(index)] = [list(self.keys[i]) for i in index]
        self.rope_length[: len(index)] = self.rope_length[torch.tensor(index)]

    def dump(self, row: int, length: int) -> dict[str, Tensor]:
        for group in self.groups.values():
            group.has_room(row, (length - 1) // self.block_size * self.block_size, length)  # refuses what is let go
        return super().dump(row, length)

    def _view(self, rows: slice, slots: int) -> Self:
        view = copy(self)
        view.tables = {window: table[rows, : -(-slots // self.block_size)] for window, table in self.tables.items()}
        view.layers = [PagedStore(store.entries, store.window, view.tables[store.window]) for store in self.layers]
        return view
