"""The block manager of a paged cache: rows get blocks as they grow, and share the blocks of a common prefix.

The design is that of vLLM (Kwon et al. 2023): a full block is identified by a hash of all tokens up to its end and has
a reference count; the least recently used blocks without references are evicted first.

Shapes: P blocks of a row.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.generation.cache.manager import CacheManager
from onward.generation.cache.rotations import rope_key
from onward.model.paged import NULL_BLOCK, PagedKVCache, max_blocks


class BlockPool:
    """The blocks of a paged cache for all layers with one attention window: `count` blocks of `size` positions,
    numbered from 1.

    Each row of the cache has a list of blocks; blocks behind the window are freed and replaced by NULL_BLOCK.
    `ref_counts` is the number of rows that hold each block. A block without references is free, but keeps its hash
    until it is allocated again. Blocks without a hash are allocated first, then the least recently used blocks.
    `window` is 0 for layers without a window; `limit` is the maximum number of blocks that a row holds; `table` (rows,
    P) is the cache's block table.
    """

    def __init__(self, window: int, size: int, limit: int, count: int, table: Tensor) -> None:
        self.window, self.size, self.limit = window, size, limit
        self.table = table  # (rows, P); NULL_BLOCK for missing blocks
        # the table's rows without trailing NULL_BLOCKs
        self.row_blocks: list[list[int]] = [[] for _ in range(len(table))]
        self.ref_counts = [0] * (count + 1)
        self.block_hashes: list[bytes | None] = [None] * (count + 1)  # None: not registered
        self.hash_to_block: dict[bytes, int] = {}
        # free blocks, in the order in which they will be allocated
        self.free = OrderedDict.fromkeys(range(1, count + 1))

    def first_visible(self, start: int) -> int:
        """Return the index, in a row's list of blocks, of the first block that queries from position `start` on attend
        to."""
        return max(0, start - self.window + 1) // self.size if self.window else 0

    def prefix_blocks(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the list of blocks of a new row, whose first blocks have the hashes `hashes`: the registered blocks,
        and NULL_BLOCK for blocks behind the window."""
        first = self.first_visible(len(hashes) * self.size)
        return [NULL_BLOCK] * first + [self.hash_to_block[h] for h in hashes[first:]]

    def allocate(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.unregister(block)
        self.ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> int:
        if block != NULL_BLOCK:
            self.ref_counts[block] += 1
            self.free.pop(block, None)
        return block

    def release(self, block: int) -> None:
        if block == NULL_BLOCK:
            return
        self.ref_counts[block] -= 1
        if not self.ref_counts[block]:
            self.free[block] = None
            if self.block_hashes[block] is None:
                self.free.move_to_end(block, last=False)

    def unregister(self, block: int) -> None:
        block_hash, self.block_hashes[block] = self.block_hashes[block], None
        if block_hash is not None:
            del self.hash_to_block[block_hash]

    def register(self, row: int, first: int, hashes: Sequence[bytes]) -> None:
        """Register the blocks of a row, from index `first` in its list on, under `hashes`, the hashes of their tokens,
        so that rows with the same prefix can share them."""
        for block, block_hash in zip(self.row_blocks[row][first:], hashes):
            if block != NULL_BLOCK and self.block_hashes[block] is None and block_hash not in self.hash_to_block:
                self.block_hashes[block], self.hash_to_block[block_hash] = block_hash, block

    def assign(self, row: int, blocks: list[int]) -> None:
        """Replace the list of blocks of a row by `blocks`, whose references are already counted, and release the old
        blocks."""
        old, self.row_blocks[row] = self.row_blocks[row], blocks
        self.table[row] = NULL_BLOCK
        self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.long)
        for block in reversed(old):  # so that prefix blocks are evicted last
            self.release(block)

    def to_allocate(self, row: int, start: int, end: int) -> list[int]:
        """Return which blocks of a row (indices in its list) must be allocated before positions start to end - 1 are
        written: missing blocks, and blocks shared with other rows."""
        blocks = self.row_blocks[row]
        writes = range(start // self.size, -(-end // self.size))
        return [i for i in writes if i >= len(blocks) or self.ref_counts[blocks[i]] != 1]

    def to_free(self, row: int, start: int, end: int) -> list[int]:
        """Return which blocks of a row (indices in its list) to free when the next query is at position `start`, and
        the row keeps the positions below `end`. These are the blocks without a position below `end`, and the blocks
        that the window hides from the first position in the block of `start`; rows that share the prefix may continue
        from that position."""
        blocks = self.row_blocks[row]
        freed = list(range(len(blocks) - 1, -(-end // self.size) - 1, -1))
        behind = self.first_visible(start // self.size * self.size) - 1
        while behind >= 0 and blocks[behind] != NULL_BLOCK:
            freed.append(behind)
            behind -= 1
        return freed

    def can_continue(self, row: int, start: int) -> bool:
        """Return whether a row has all blocks that queries from position `start` on attend to."""
        blocks, first = self.row_blocks[row], self.first_visible(start)
        return start <= len(blocks) * self.size and (start <= first * self.size or blocks[first] != NULL_BLOCK)

    def has_capacity(self, row: int, start: int, end: int) -> bool:
        """Return whether `reserve` with the same arguments would find enough free blocks. Raises a UserError if the
        row lacks blocks that queries from `start` on attend to."""
        if not self.can_continue(row, start):
            raise UserError(f"a row lacks blocks that position {start} attends to: allocate the row again")
        blocks = self.row_blocks[row]
        freed = sum(self.ref_counts[blocks[i]] == 1 for i in self.to_free(row, start, end))
        return len(self.to_allocate(row, start, end)) <= len(self.free) + freed

    def reserve(self, row: int, start: int, end: int) -> tuple[list[int], tuple[int, int] | None]:
        """Allocate unshared blocks for positions start to end - 1 of a row, and free the blocks that `to_free` returns.

        Returns the allocated blocks. If the first of them replaces a shared block with positions before `start`, also
        returns (source, target): the block to copy and its replacement.
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
    """The manager of a PagedKVCache: assigns its rows and blocks to requests.

    `allocate` shares the registered blocks of the longest cached prefix of the request's tokens, in all layers or in
    none. A shared block is copied before a row writes to it. `reserve` frees blocks behind the window and blocks from
    `end` on, so a row can be rolled back as far as the `start` of the last call.
    """

    @checked
    def __init__(self, cache: PagedKVCache) -> None:
        self.cache: PagedKVCache = cache
        self.block_size = cache.block_size
        self.pools: dict[int, BlockPool] = {}  # by window
        for window, table in cache.tables.items():
            limit = max_blocks(window, cache.block_size, cache.chunk, table.size(1))
            self.pools[window] = BlockPool(window, cache.block_size, limit, cache.num_blocks[window], table)
        root = rope_key(cache.config, cache.length)
        self.hashes = [[root] for _ in range(cache.rows)]  # per row: its rope_key, then the hashes of registered blocks

    def allocate(
        self, row: int, tokens: Sequence[int], rope_length: int, key: str = "", most: int | None = None
    ) -> int | None:
        """Assign a row to a request, with the registered blocks of its longest cached prefix; see
        `CacheManager.allocate`."""
        self.free(row)
        hashes = self.chain([rope_key(self.cache.config, rope_length) + key.encode()], tokens[:-1][:most])
        num_shared, pools = self.longest_prefix(hashes[1:]), self.pools.values()
        prefixes = [pool.prefix_blocks(hashes[1 : 1 + num_shared]) for pool in pools]
        for pool, blocks in zip(pools, prefixes):
            needed = min(-(-len(tokens) // self.block_size), pool.limit + blocks.count(NULL_BLOCK)) - num_shared
            if needed > len(pool.free) - sum(block in pool.free for block in blocks):
                return None
        for pool, blocks in zip(pools, prefixes):
            pool.assign(row, [pool.acquire(block) for block in blocks])
        self.hashes[row] = hashes[: 1 + num_shared]
        self.cache.rope_length[row] = rope_length
        return num_shared * self.block_size

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks of a request that are cached, given the hashes of all its blocks. In each
        pool, all blocks of this prefix within the pool's window must be registered."""
        num_shared, runs = 0, dict.fromkeys(self.pools, 0)
        for n, key in enumerate(hashes, 1):
            for window, pool in self.pools.items():
                runs[window] = runs[window] + 1 if key in pool.hash_to_block else 0
            if runs and all(runs[w] >= n - pool.first_visible(n * self.block_size) for w, pool in self.pools.items()):
                num_shared = n
        return num_shared

    def reserve(self, row: int, start: int, end: int) -> bool:
        """Allocate unshared blocks for positions start to end - 1 of a row. Returns False, and changes nothing, if too
        few blocks are free. See `CacheManager.reserve`."""
        if not all(pool.has_capacity(row, start, end) for pool in self.pools.values()):
            return False
        for window, pool in self.pools.items():
            new, copied = pool.reserve(row, start, end)
            if not new:
                continue
            if not start:  # the first call overwrites all reserved positions; see CacheManager
                new = new[-1:] if end % self.block_size else []
            index = torch.tensor(new, dtype=torch.long, device=self.cache.rope_length.device)
            for cache in self.cache.layers:
                for entry in cache.entries.values() if cache.window == window else ():
                    entry.index_fill_(0, index, 0)
                    if copied:
                        entry[copied[1]] = entry[copied[0]]
        del self.hashes[row][1 + start // self.block_size :]
        return True

    def register_prefix(self, row: int, tokens: Sequence[int]) -> None:
        """Register the full blocks of a row, which contains `tokens`, so that other rows can share them."""
        known = len(self.hashes[row])
        self.hashes[row] = self.chain(self.hashes[row], tokens)
        for pool in self.pools.values():
            pool.register(row, known - 1, self.hashes[row][known:])

    def chain(self, hashes: list[bytes], tokens: Sequence[int]) -> list[bytes]:
        """Return `hashes` (of the row's leading blocks) followed by the hashes of the further full blocks of `tokens`.
        Each hash is computed from the block's tokens and the hash before it."""
        hashes = list(hashes)
        for start in range((len(hashes) - 1) * self.block_size, len(tokens) - self.block_size + 1, self.block_size):
            block = array("q", tokens[start : start + self.block_size]).tobytes()
            hashes.append(hashlib.sha256(hashes[-1] + block).digest())
        return hashes

    def free(self, row: int) -> None:
        for pool in self.pools.values():
            pool.assign(row, [])
        del self.hashes[row][1:]
        self.cache.states.forget(row)

    def can_continue(self, row: int, position: int) -> bool:
        """Return whether a row has all blocks that queries from `position` on attend to."""
        return all(pool.can_continue(row, position) for pool in self.pools.values())

    def fork(self, source: int, target: int, length: int) -> None:
        """Share the blocks of the first `length` positions of row `source` with row `target`, and copy its states and
        its rope_length."""
        self.cache.states.copy([source], [target])
        for pool in self.pools.values():
            blocks = pool.row_blocks[source][: -(-length // self.block_size)]
            pool.assign(target, [pool.acquire(block) for block in blocks])
        self.hashes[target] = self.hashes[source][: 1 + length // self.block_size]
        self.cache.rope_length[target] = self.cache.rope_length[source]

    def move(self, source: int, target: int) -> None:
        """Move the blocks of row `source` to the free row `target`."""
        self.fork(source, target, self.cache.length + self.cache.chunk)
        self.free(source)

    def reorder(self, index: Sequence[int]) -> None:
        """Give row i the blocks of row index[i] for every i; `index` may omit or repeat rows. Used by beam search."""
        for pool in self.pools.values():
            rows = [[pool.acquire(block) for block in pool.row_blocks[i]] for i in index]
            for row, blocks in enumerate(rows):
                pool.assign(row, blocks)
        self.hashes[: len(index)] = [list(self.hashes[i]) for i in index]
        self.cache.states.copy(index, range(len(index)))
        self.cache.rope_length[: len(index)] = self.cache.rope_length[torch.tensor(index)]

    def dump(self, row: int, length: int) -> dict[str, Tensor]:
        """Return the cache entries of a row with `length` tokens; see `CacheManager.dump`. Raises a UserError if a
        block with these entries was freed."""
        if not self.can_continue(row, (length - 1) // self.block_size * self.block_size):
            raise UserError(f"Cannot save the first {length} tokens of a row, because some of their blocks were freed")
        return super().dump(row, length)
