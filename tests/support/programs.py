"""Random programs over the rows of a cache, with the logits of each call compared with those of the plain model."""

from collections import Counter
from dataclasses import dataclass
from random import Random

import torch

from onward import BlockManager, CacheManager, Decoder, KVCache
from onward.model.paged import NULL_BLOCK

from support.decoders import assert_close
from support.devices import device

ROWS, LENGTH, CHUNK = 4, 12, 4


@dataclass
class Row:
    """The content of a cache row."""

    text: list[int]  # the tokens in the cache
    waiting: list[int]  # the tokens of the prompt that are not cached
    low: int = 0  # the smallest number of tokens to which the row can be rolled back


class Program:
    """Requests that arrive, continue and leave, and are rolled back, copied and moved, at random (`random`)."""

    def __init__(self, model: Decoder, manager: CacheManager, random: Random) -> None:
        self.model, self.manager, self.random = model, manager, random
        self.rows: list[Row | None] = [None] * ROWS
        self.texts: list[list[int]] = [[]]  # prefixes of new requests
        self.shared = self.refused = 0  # number of cached tokens found by `allocate`, and of calls without room

    def run(self, steps: int) -> None:
        for _ in range(steps):
            row = self.random.randrange(ROWS)
            taken = [self.feed] * 4 + [self.fork, self.move, self.reorder, self.free]
            self.random.choice(taken if self.rows[row] else [self.allocate])(row)
            check_blocks(self.manager)

    def tokens(self, most: int) -> list[int]:
        # only two token ids, so that prefixes are often equal
        return [self.random.randrange(2) for _ in range(self.random.randint(1, most))]

    def allocate(self, row: int) -> None:
        text = self.random.choice(self.texts[-5:])
        prompt = [*text[: self.random.randint(0, len(text))], *self.tokens(8)][: LENGTH - 1]
        held = self.manager.allocate(row, prompt, self.random.choice([LENGTH, LENGTH, 7]))
        if held is None:
            self.refused += 1
        else:
            assert 0 <= held < len(prompt)
            self.shared += held
            self.rows[row] = Row(prompt[:held], prompt[held:], held)

    def feed(self, row: int) -> None:
        """Continue some rows in one call, each with its own number of tokens."""
        starts, pieces = [], []
        for r, state in enumerate(self.rows[row : self.random.randint(row + 1, ROWS)], row):
            if state is None:
                break
            start, waiting = len(state.text), state.waiting
            if self.random.random() < 0.3:
                start, waiting = self.random.randint(state.low, start), []
            piece = (waiting or self.tokens(CHUNK))[: min(CHUNK, LENGTH - start)]
            if not piece or not self.manager.reserve(r, start, start + len(piece)):
                self.refused += bool(piece)
                break
            state.text, state.waiting, state.low = state.text[:start] + piece, waiting[len(piece) :], start
            starts.append(start)
            pieces.append(piece)
        if not pieces:
            return
        width = max(map(len, pieces))
        tokens = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in pieces])
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        length = int(positions.max()) + 1 if self.random.random() < 0.5 else None
        logits = self.model(tokens, positions, self.manager.cache.view(row, row + len(pieces), length))
        for r, piece, found in zip(range(row, ROWS), pieces, logits):
            state = self.rows[r]
            assert state
            assert_close(found[: len(piece)], self.plain(state.text, r)[-len(piece) :])
            if self.random.random() < 0.5:
                self.texts.append(list(state.text))
                self.manager.register_prefix(r, self.texts[-1])

    def plain(self, text: list[int], row: int) -> torch.Tensor:
        """The logits from a new cache (not without a cache, since the rope_length of the row may be longer than the
        text)."""
        cache = KVCache(self.model.config, 1, LENGTH, len(text), device=device())
        cache.rope_length[0] = self.manager.cache.rope_length[row]
        return self.model(torch.tensor([text]), torch.arange(len(text))[None], cache)[0]

    def fork(self, row: int) -> None:
        target, state = self.random.randrange(ROWS), self.state(row)
        length = self.random.randint(state.low, len(state.text))
        if target != row and length:
            self.manager.fork(row, target, length)
            self.rows[target] = Row(state.text[:length], [], state.low)

    def move(self, row: int) -> None:
        target = self.random.randrange(ROWS)
        if self.rows[target] is None:
            self.manager.move(row, target)
            self.rows[target], self.rows[row] = self.rows[row], None

    def reorder(self, row: int) -> None:
        index = [self.random.randrange(ROWS) for _ in range(row + 1)]
        self.manager.reorder(index)
        states = [self.rows[i] for i in index]
        self.rows[: len(index)] = [s and Row(list(s.text), list(s.waiting), s.low) for s in states]

    def free(self, row: int) -> None:
        self.manager.free(row)
        self.rows[row] = None

    def state(self, row: int) -> Row:
        state = self.rows[row]
        assert state
        return state


def check_blocks(manager: CacheManager) -> None:
    """Check that no block is lost, free while a row uses it, or found by two hashes."""
    if not isinstance(manager, BlockManager):
        return
    for pool in manager.pools.values():
        counts = Counter(block for blocks in pool.row_blocks for block in blocks if block != NULL_BLOCK)
        assert pool.ref_counts == [counts[block] for block in range(len(pool.ref_counts))]
        assert set(pool.free) == {block for block in range(1, len(pool.ref_counts)) if not counts[block]}
        assert pool.hash_to_block == {
            found: block for block, found in enumerate(pool.block_hashes) if found is not None
        }
        for blocks, table in zip(pool.row_blocks, pool.table.tolist()):
            assert table == blocks + [NULL_BLOCK] * (len(table) - len(blocks))
            assert len(blocks) - blocks.count(NULL_BLOCK) <= pool.limit
