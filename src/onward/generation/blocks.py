"""The block manager of a paged cache: rows get blocks as they grow, and share those of a common prefix.

The design is that of vLLM (Kwon et al. 2023): blocks are found by a hash of all tokens up to their end, counted by the
rows that use them, and evicted least recently used first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from onward.errors import UserError
from onward.generation.cache_manager import CacheManager, rope_key
from onward.model.paged import NULL_BLOCK, PagedKVCache, max_blocks


class BlockPool:
    """The blocks of the layers of one window (0: no window): which row has which, and which tokens find them.

    A row has a list of blocks, of which the first may be NULL_BLOCK: they were freed, being behind the window.
    `ref_counts` says how many rows have a block. Blocks of no row are free, but are still found by their hash until
    they are allocated: first those without a hash, then the least recently used.
    """

    def __init__(self, window: int, size: int, limit: int, count: int, table: Tensor) -> None:
        self.window, self.size, self.limit = window, size, limit  # a row has at most `limit` blocks
        self.table = table  # (rows, P), NULL_BLOCK where a row has none
        self.row_blocks: list[list[int]] = [[] for _ in range(len(table))]  # the same, without NULL_BLOCK at the end
        self.ref_counts = [0] * (count + 1)
        self.block_hashes: list[bytes | None] = [None] * (count + 1)
        self.hash_to_block: dict[bytes, int] = {}
        self.free = OrderedDict.fromkeys(range(1, count + 1))

    def first_visible(self, start: int) -> int:
        """The first block that a query at position `start`, or a later one, sees."""
        return max(0, start - self.window + 1) // self.size if self.window else 0

    def prefix_blocks(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of a row that continues after the blocks of these hashes."""
        first = self.first_visible(len(hashes) * self.size)
        return [NULL_BLOCK] * first + [self.hash_to_block[h] for h in hashes[first:]]

    def allocate(self) -> int:
        """A free block, for one row."""
        block, _ = self.free.popitem(last=False)
        self.unregister(block)
        self.ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> int:
        """The same block, for one row more."""
        if block != NULL_BLOCK:
            self.ref_counts[block] += 1
            self.free.pop(block, None)
        return block

    def release(self, block: int) -> None:
        """One row fewer has the block."""
        if block == NULL_BLOCK:
            return
        self.ref_counts[block] -= 1
        if not self.ref_counts[block]:
            self.free[block] = None
            if self.block_hashes[block] is None:
                self.free.move_to_end(block, last=False)

    def unregister(self, block: int) -> None:
        """The block is no longer found by a hash."""
        found, self.block_hashes[block] = self.block_hashes[block], None
        if found is not None:
            del self.hash_to_block[found]

    def register(self, row: int, first: int, hashes: Sequence[bytes]) -> None:
        """The blocks of a row, from the `first` on, hold the tokens of these hashes."""
        for block, found in zip(self.row_blocks[row][first:], hashes):
            if block != NULL_BLOCK and self.block_hashes[block] is None and found not in self.hash_to_block:
                self.block_hashes[block], self.hash_to_block[found] = found, block

    def assign(self, row: int, blocks: list[int]) -> None:
        """A row has these blocks, which it has acquired, and no longer those it had."""
        old, self.row_blocks[row] = self.row_blocks[row], blocks
        self.table[row] = NULL_BLOCK
        self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.long)
        for block in reversed(old):  # so that prefix blocks are evicted last
            self.release(block)

    def to_allocate(self, row: int, start: int, end: int) -> list[int]:
        """Which blocks of a row must be allocated to write positions start to end - 1: missing or shared ones."""
        blocks = self.row_blocks[row]
        writes = range(start // self.size, -(-end // self.size))
        return [i for i in writes if i >= len(blocks) or self.ref_counts[blocks[i]] != 1]

    def to_free(self, row: int, start: int, end: int) -> list[int]:
        """Which blocks of a row lie at `end` and beyond, or are not seen from the beginning of the block of `start`,
        from where others may continue that share what lies before."""
        blocks = self.row_blocks[row]
        freed = list(range(len(blocks) - 1, -(-end // self.size) - 1, -1))
        behind = self.first_visible(start // self.size * self.size) - 1
        while behind >= 0 and blocks[behind] != NULL_BLOCK:
            freed.append(behind)
            behind -= 1
        return freed

    def can_continue(self, row: int, start: int) -> bool:
        """Whether a row has all blocks that queries from position `start` on see."""
        blocks, first = self.row_blocks[row], self.first_visible(start)
        return start <= len(blocks) * self.size and (start <= first * self.size or blocks[first] != NULL_BLOCK)

    def has_capacity(self, row: int, start: int, end: int) -> bool:
        """Whether `reserve` finds all blocks. A UserError where the row lacks blocks that queries from `start` see."""
        if not self.can_continue(row, start):
            raise UserError(f"a row does not hold all that is seen from position {start}: allocate it again")
        blocks = self.row_blocks[row]
        freed = sum(self.ref_counts[blocks[i]] == 1 for i in self.to_free(row, start, end))
        return len(self.to_allocate(row, start, end)) <= len(self.free) + freed

    def reserve(self, row: int, start: int, end: int) -> tuple[list[int], tuple[int, int] | None]:
        """Give a row blocks of its own for positions start to end - 1.

        Returns the blocks that were allocated and, where the first of them replaces a shared block that the row keeps
        reading, (source, target) of the copy to make.
        """
        blocks, new, copied = self.row_blocks[row], [], None
        for i in self.to_free(row, start, end):
            self.release(blocks[i])
            blocks[i] = self.table[row, i] = NULL_BLOCK
        del blocks[-(-end // self.size) :]
        for i in range(start // self.size, len(blocks)):
            if self.ref_counts[blocks[i]] == 1:
                self.unregister(blocks[i])
        for i in self.to_allocate(row, start, end):
            block = self.allocate()
            new.append(block)
            if i < len(blocks):
                if i * self.size < start:
                    copied = blocks[i], block
                self.release(blocks[i])
                blocks[i] = block
            else:
                blocks.append(block)
            self.table[row, i] = block
        return new, copied


class BlockManager(CacheManager):
    """Gives the rows and blocks of a PagedKVCache to requests.

    Blocks that hold the tokens a request begins with are shared by `allocate`, in every layer or in none, once
    `register_prefix` has named them and until they are evicted. A block that several rows have is copied before one of
    them writes to it. `reserve` frees what a window has passed and what lies at `end` and beyond, so rows can be
    rolled back as far as the `start` of the last call.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache: PagedKVCache = cache
        self.block_size = cache.block_size
        self.pools: dict[int, BlockPool] = {}  # by window
        for window, table in cache.tables.items():
            limit = max_blocks(window, cache.block_size, cache.chunk, table.size(1))
            self.pools[window] = BlockPool(window, cache.block_size, limit, cache.num_blocks[window], table)
        root = rope_key(cache.config, cache.length)
        self.hashes = [[root] for _ in range(cache.rows)]  # of the registered blocks of each row, behind a root

    def allocate(self, row: int, tokens: Sequence[int], rope_length: int) -> int | None:
        self.free(row)
        hashes = self.chain([rope_key(self.cache.config, rope_length)], tokens[:-1])
        found, pools = self.longest_prefix(hashes[1:]), self.pools.values()
        prefixes = [pool.prefix_blocks(hashes[1 : 1 + found]) for pool in pools]
        for pool, blocks in zip(pools, prefixes):
            wanted = min(-(-len(tokens) // self.block_size), pool.limit + blocks.count(NULL_BLOCK)) - found
            if wanted > len(pool.free) - sum(block in pool.free for block in blocks):
                return None
        for pool, blocks in zip(pools, prefixes):
            pool.assign(row, [pool.acquire(block) for block in blocks])
        self.hashes[row] = hashes[: 1 + found]
        self.cache.rope_length[row] = rope_length
        return found * self.block_size

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many of the first blocks, by their hashes, are found with all that their windows need."""
        found, runs = 0, dict.fromkeys(self.pools, 0)
        for n, key in enumerate(hashes, 1):
            for window, pool in self.pools.items():
                runs[window] = runs[window] + 1 if key in pool.hash_to_block else 0
            if all(runs[w] >= n - pool.first_visible(n * self.block_size) for w, pool in self.pools.items()):
                found = n
        return found

    def reserve(self, row: int, start: int, end: int) -> bool:
        if not all(pool.has_capacity(row, start, end) for pool in self.pools.values()):
            return False
        for window, pool in self.pools.items():
            new, copied = pool.reserve(row, start, end)
            for cache in self.cache.layers if new else ():
                for entry in cache.entries.values() if cache.window == window else ():
                    entry[new] = 0  # see CacheManager: NaN of an earlier row would not be hidden by a mask
                    if copied:
                        entry[copied[1]] = entry[copied[0]]
        del self.hashes[row][1 + start // self.block_size :]
        return True

    def register_prefix(self, row: int, tokens: Sequence[int]) -> None:
        known = len(self.hashes[row])
        self.hashes[row] = self.chain(self.hashes[row], tokens)
        for pool in self.pools.values():
            pool.register(row, known - 1, self.hashes[row][known:])

    def chain(self, hashes: list[bytes], tokens: Sequence[int]) -> list[bytes]:
        """The hashes of whole blocks of tokens, each made from the one before; the first `hashes` are known."""
        hashes = list(hashes)
        for start in range((len(hashes) - 1) * self.block_size, len(tokens) - self.block_size + 1, self.block_size):
            block = array("q", tokens[start : start + self.block_size]).tobytes()
            hashes.append(hashlib.sha256(hashes[-1] + block).digest())
        return hashes

    def free(self, row: int) -> None:
        for pool in self.pools.values():
            pool.assign(row, [])
        del self.hashes[row][1:]

    def can_continue(self, row: int, position: int) -> bool:
        return all(pool.can_continue(row, position) for pool in self.pools.values())

    def fork(self, source: int, target: int, length: int) -> None:
        for pool in self.pools.values():
            blocks = pool.row_blocks[source][: -(-length // self.block_size)]
            pool.assign(target, [pool.acquire(block) for block in blocks])
        self.hashes[target] = self.hashes[source][: 1 + length // self.block_size]
        self.cache.rope_length[target] = self.cache.rope_length[source]

    def move(self, source: int, target: int) -> None:
        self.fork(source, target, self.cache.length + self.cache.chunk)
        self.free(source)

    def reorder(self, index: Sequence[int]) -> None:
        for pool in self.pools.values():
            rows = [[pool.acquire(block) for block in pool.row_blocks[i]] for i in index]
            for row, blocks in enumerate(rows):
                pool.assign(row, blocks)
        self.hashes[: len(index)] = [list(self.hashes[i]) for i in index]
        self.cache.rope_length[: len(index)] = self.cache.rope_length[torch.tensor(index)]

    def dump(self, row: int, length: int) -> dict[str, Tensor]:
        if not self.can_continue(row, (length - 1) // self.block_size * self.block_size):
            raise UserError(f"a row no longer holds its first {length} tokens: they cannot be kept")
        return super().dump(row, length)
