"""Every kind of cache gives the plain model's logits under random sequences of operations on its rows."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onward import BlockManager, CacheManager, Decoder, DecoderConfig, KVCache, PagedKVCache, SelfAttention, UserError
from onward.generation.cache.blocks import BlockPool
from onward.model.paged import NULL_BLOCK

from support.decoders import DECODERS, LENGTH, assert_close, config, decoder, token_ids
from support.devices import device
from support.grids import first
from support.programs import CHUNK, ROWS, Program
from support.ways import CACHED

QUANTIZED = 0.05  # maximum error of logits with an 8-bit cache, relative to the largest logit
every_decoder = pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS.keys())
NAMES = "llama", "gemma2", "alibi in windows", "everything about scores", "deepseek", "scaled turns"
MODELS = {name: decoder(DECODERS[name]) for name in NAMES}


def in_blocks(model: Decoder, blocks: int, size: int) -> BlockManager:
    return BlockManager(
        PagedKVCache(model.config, ROWS, LENGTH, CHUNK, blocks=blocks, block_size=size, device=device())
    )


CACHES: dict[str, Callable[[Decoder], CacheManager]] = {
    "contiguous": lambda model: CacheManager(KVCache(model.config, ROWS, LENGTH, CHUNK, device=device())),
    "growing": lambda model: CacheManager(KVCache(model.config, ROWS, LENGTH, CHUNK, step=2, device=device())),
    "paged": lambda model: in_blocks(model, 17, 2),
    "paged in blocks of 3": lambda model: in_blocks(model, 11, 3),
    "paged by token": lambda model: in_blocks(model, 99, 1),
}


@every_decoder
@pytest.mark.parametrize("kind", ["growing", "paged", "quantized", "quantized paged"])
@torch.inference_mode()
def test_every_cache_gives_the_logits_of_the_plain_run(config: DecoderConfig, kind: str) -> None:
    model, tokens = decoder(config), token_ids(config)
    plain = model(tokens)
    for way in CACHED.values():
        assert_close(way(model, tokens, kind), plain, QUANTIZED if "quantized" in kind else 1e-5)


@pytest.mark.parametrize("kind", first(3, CACHES))
@settings(max_examples=10)
@given(name=st.sampled_from(NAMES), random=st.randoms(use_true_random=False))
@torch.inference_mode()
def test_random_programs_over_rows_equal_the_plain_run(kind: str, name: str, random: Random) -> None:
    Program(MODELS[name], CACHES[kind](MODELS[name]), random).run(25)


def first_run(self: BlockManager, hashes: list[bytes]) -> int:
    """The number of leading hashes that any group has, ignoring the blocks that windows need."""
    missing = [n for n, key in enumerate(hashes) if not any(key in p.hash_to_block for p in self.pools.values())]
    return min(missing, default=len(hashes))


MUTANTS = {  # a mutation: the mutated function, and its replacement
    "nothing is copied on write": (
        "BlockPool.to_allocate",
        lambda self, row, start, end: [
            i
            for i in range(start // self.size, -(-end // self.size))
            if i >= len(self.row_blocks[row]) or self.row_blocks[row][i] == NULL_BLOCK
        ],
    ),
    "a prefix is shared although a window's blocks are gone": ("BlockManager.longest_prefix", first_run),
    "a block that a window still needs is freed": (
        "BlockPool.first_visible",
        lambda self, start: max(0, start - self.window + 1 + self.size) // self.size if self.window else 0,
    ),
    "blocks past the end are kept, and padding is written to them": (
        "BlockPool.to_free",
        lambda self, row, start, end, whole=BlockPool.to_free: [
            i for i in whole(self, row, start, end) if i * self.size < end
        ],
    ),
    "blocks that are written to are still found": (
        "BlockPool.unregister",
        lambda self, block, whole=BlockPool.unregister: None if self.ref_counts[block] else whole(self, block),
    ),
    "rows with different rope_lengths share blocks": ("rope_key", lambda config, rope_length: b""),
}


def run_many() -> None:
    for seed in range(40):
        for name in "gemma2", "scaled turns", "everything about scores":
            Program(MODELS[name], CACHES["paged"](MODELS[name]), Random(seed)).run(40)


@pytest.mark.parametrize("mutant", MUTANTS)
@torch.inference_mode()
def test_random_programs_notice_mutant(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, broken = MUTANTS[mutant]
    monkeypatch.setattr(f"onward.generation.cache.blocks.{place}", broken)
    if broken is first_run:  # this mutant must also accept missing blocks
        found = "onward.generation.cache.blocks.BlockPool.prefix_blocks"
        monkeypatch.setattr(found, lambda self, hashes: [self.hash_to_block.get(h, NULL_BLOCK) for h in hashes])
        monkeypatch.setattr("onward.generation.cache.blocks.BlockPool.can_continue", lambda self, row, start: True)
    with pytest.raises(AssertionError):
        run_many()


def paged(blocks: int, window: int = 0, rows: int = 3, chunk: int = 4, length: int = 12) -> BlockManager:
    c = config(attention=(SelfAttention(window=window), SelfAttention()) if window else SelfAttention())
    return BlockManager(PagedKVCache(c, rows, length, chunk, blocks=blocks, block_size=2, device=device()))


def test_allocation_without_enough_blocks_changes_nothing() -> None:
    cache = paged(blocks=5)
    assert cache.allocate(0, [1] * 6, 12) == 0
    assert cache.reserve(0, 0, 6)
    before = [list(blocks) for blocks in cache.pools[0].row_blocks]
    assert cache.allocate(1, [2] * 5, 12) is None
    assert not cache.reserve(1, 0, 5)
    assert cache.pools[0].row_blocks == before
    assert cache.allocate(1, [2] * 4, 12) == 0
    assert cache.reserve(1, 0, 4)
    assert not cache.reserve(0, 6, 7)
    cache.free(1)
    assert cache.reserve(0, 6, 7)


def test_block_pool_evicts_least_recently_used_first() -> None:
    cache = paged(blocks=6)
    for row, token in enumerate([1, 2, 3]):
        cache.allocate(row, [token] * 5, 12)
        cache.reserve(row, 0, 4)
        cache.register_prefix(row, [token] * 4 if token < 3 else [3, 3])
    for row in range(3):
        cache.free(row)  # the last block of row 2 is not full and has no hash

    for taken, left in (0, [4, 4, 2]), (1, [4, 4, 2]), (2, [2, 4, 2]), (3, [0, 4, 2]):
        cache.reserve(0, 0, 2 * taken)
        found = []
        for token in 1, 2, 3:
            found.append(cache.allocate(2, [token] * 5, 12))
            cache.free(2)
        assert found == left
        cache.free(0)


def test_window_layers_keep_the_blocks_of_the_window_only() -> None:
    cache = paged(blocks=99, window=3, rows=1, chunk=2, length=100)
    cache.allocate(0, list(range(50)), 100)
    for start in range(0, 100, 2):
        assert cache.reserve(0, start, start + 2)
        assert len(cache.pools[0].row_blocks[0]) == start // 2 + 1
        assert sum(block != NULL_BLOCK for block in cache.pools[3].row_blocks[0]) == min(2, start // 2 + 1)
    assert len(cache.pools[3].ref_counts) == 1 + 3  # the null block, and the maximum number of blocks of a row


def test_fork_allocates_blocks_on_write_only() -> None:
    cache = paged(blocks=9)
    cache.reserve(0, 0, 5)
    cache.fork(0, 1, 5)
    cache.fork(0, 2, 3)
    assert [len(blocks) for blocks in cache.pools[0].row_blocks] == [3, 3, 2]
    assert len(cache.pools[0].free) == 9 - 3
    cache.reserve(1, 5, 6)
    assert len(cache.pools[0].free) == 9 - 4
    cache.reserve(2, 4, 5)  # earlier blocks are full and remain shared
    assert len(cache.pools[0].free) == 9 - 5


@pytest.mark.parametrize("kind", ["growing", "paged"])
@torch.inference_mode()
def test_call_without_reserved_blocks_is_a_user_error(kind: str) -> None:
    cache = CACHES[kind](MODELS["llama"])
    cache.reserve(0, 0, 3)
    tokens = token_ids(MODELS["llama"].config, 1, 1)
    for position, cached in (2, cache.cache.view(0, 1)), (2, cache.cache.view(0, 1, 3)):
        MODELS["llama"](tokens, torch.tensor([[position]]), cached)
    with pytest.raises(UserError, match="position"):
        MODELS["llama"](tokens, torch.tensor([[5]]), cache.cache.view(0, 1))


def test_row_is_not_rolled_back_past_its_window_blocks() -> None:
    cache = paged(blocks=99, window=3)
    for start in 0, 4, 8:
        cache.reserve(0, start, start + 4)
    with pytest.raises(UserError, match="lacks blocks that position 3 attends to"):
        cache.reserve(0, 3, 4)
    with pytest.raises(UserError, match="position 5"):
        cache.reserve(1, 5, 6)


@pytest.mark.parametrize("kind", CACHES)
def test_cache_made_in_inference_mode_is_writable_outside_of_it(kind: str) -> None:
    model, tokens = MODELS["gemma2"], token_ids(MODELS["gemma2"].config, 1, 4)
    with torch.inference_mode():
        cache = CACHES[kind](model)
        cache.allocate(0, [1], LENGTH)
        cache.reserve(0, 0, 4)
    with torch.no_grad():
        model(tokens, torch.arange(4)[None], cache.cache.view(0, 1))
        cache.fork(0, 1, 3)
        cache.reserve(1, 3, 4)
        cache.move(1, 2)
        cache.reorder([2, 0])
        assert cache.allocate(1, [1], LENGTH) == 0
