"""Every kind of cache gives what the plain model gives, whatever is done with its rows."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.errors import UserError
from onward.model.cache import Cache
from onward.model.config import DecoderConfig, SelfAttention
from onward.model.decoder import Decoder
from onward.model.paged import BIN, Blocks, PagedCache

from support.decoders import DECODERS, LENGTH, assert_close, config, decoder, token_ids
from support.programs import CHUNK, ROWS, Program
from support.ways import CACHED

QUANTIZED = 0.05  # how far logits may be from exact ones with keys and values of 8 bits, as a share of the largest
every_decoder = pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS.keys())
NAMES = "llama", "gemma2", "alibi in windows", "everything about scores", "deepseek", "scaled turns"
MODELS = {name: decoder(DECODERS[name]) for name in NAMES}
CACHES: dict[str, Callable[[Decoder], Cache]] = {
    "contiguous": lambda model: Cache(model.config, ROWS, LENGTH, CHUNK),
    "growing": lambda model: Cache(model.config, ROWS, LENGTH, CHUNK, step=2),
    "paged": lambda model: PagedCache(model.config, ROWS, LENGTH, CHUNK, blocks=17, block_size=2),
    "paged in blocks of 3": lambda model: PagedCache(model.config, ROWS, LENGTH, CHUNK, blocks=11, block_size=3),
    "paged by token": lambda model: PagedCache(model.config, ROWS, LENGTH, CHUNK, blocks=99, block_size=1),
}


@every_decoder
@pytest.mark.parametrize("kind", ["growing", "paged", "quantized", "quantized paged"])
@torch.inference_mode()
def test_every_way_gives_the_logits_of_the_plain_run_with_every_cache(config: DecoderConfig, kind: str) -> None:
    model, tokens = decoder(config), token_ids(config)
    plain = model(tokens)
    for way in CACHED.values():
        assert_close(way(model, tokens, kind), plain, QUANTIZED if "quantized" in kind else 1e-5)


@pytest.mark.parametrize("kind", CACHES)
@settings(max_examples=25)
@given(name=st.sampled_from(NAMES), random=st.randoms(use_true_random=False))
@torch.inference_mode()
def test_rows_that_come_go_branch_and_share_equal_the_plain_run(kind: str, name: str, random: Random) -> None:
    Program(MODELS[name], CACHES[kind](MODELS[name]), random).run(25)


def first_run(self: PagedCache, keys: list[bytes]) -> int:
    """How many keys are found in any group, whatever windows need."""
    missing = [n for n, key in enumerate(keys) if not any(key in group.found for group in self.groups.values())]
    return min(missing, default=len(keys))


MUTANTS = {  # what is broken: its place, what it becomes
    "nothing is copied on write": (
        "Blocks.fresh",
        lambda self, row, start, end: [
            i
            for i in range(start // self.size, -(-end // self.size))
            if i >= len(self.held[row]) or self.held[row][i] == BIN
        ],
    ),
    "a prefix is shared although a window's blocks are gone": ("PagedCache.longest", first_run),
    "a block is let go that a window still needs": (
        "Blocks.first",
        lambda self, start: max(0, start - self.window + 1 + self.size) // self.size if self.window else 0,
    ),
    "blocks past the end are kept, and pads written to them": (
        "Blocks.gone",
        lambda self, row, start, end, whole=Blocks.gone: [
            i for i in whole(self, row, start, end) if i * self.size < end
        ],
    ),
    "blocks that are written to are still found": (
        "Blocks.forget",
        lambda self, block, whole=Blocks.forget: None if self.users[block] else whole(self, block),
    ),
    "rows of other rope_lengths share": ("rotation_key", lambda config, rope_length: b""),
}


def run_many() -> None:
    for seed in range(40):
        for name in "gemma2", "scaled turns", "everything about scores":
            Program(MODELS[name], CACHES["paged"](MODELS[name]), Random(seed)).run(40)


@pytest.mark.parametrize("mutant", MUTANTS)
@torch.inference_mode()
def test_the_programs_notice_when(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, broken = MUTANTS[mutant]
    monkeypatch.setattr(f"onward.model.paged.{place}", broken)
    if broken is first_run:  # and does not mind what is missing
        found = "onward.model.paged.Blocks.beginning"
        monkeypatch.setattr(found, lambda self, keys: [self.found.get(key, BIN) for key in keys])
        room = "onward.model.paged.Blocks.has_room"
        monkeypatch.setattr(room, lambda self, row, start, end: len(self.fresh(row, start, end)) <= len(self.free))
    with pytest.raises(AssertionError):
        run_many()


def paged(blocks: int, window: int = 0, rows: int = 3, chunk: int = 4, length: int = 12) -> PagedCache:
    c = config(attention=(SelfAttention(window=window), SelfAttention()) if window else SelfAttention())
    return PagedCache(c, rows, length, chunk, blocks=blocks, block_size=2)


def test_a_request_waits_until_there_are_blocks_and_nothing_changes_meanwhile() -> None:
    cache = paged(blocks=5)
    assert cache.open(0, [1] * 6, 12) == 0
    assert cache.extend(0, 0, 6)
    before = [list(blocks) for blocks in cache.groups[0].held]
    assert cache.open(1, [2] * 5, 12) is None
    assert not cache.extend(1, 0, 5)
    assert cache.groups[0].held == before
    assert cache.open(1, [2] * 4, 12) == 0
    assert cache.extend(1, 0, 4)
    assert not cache.extend(0, 6, 7)
    cache.close(1)
    assert cache.extend(0, 6, 7)


def test_what_was_freed_first_is_reused_first_and_what_nothing_finds_before_it() -> None:
    cache = paged(blocks=6)
    for row, token in enumerate([1, 2, 3]):
        cache.open(row, [token] * 5, 12)
        cache.extend(row, 0, 4)
        cache.commit(row, [token] * 4 if token < 3 else [3, 3])
    for row in range(3):
        cache.close(row)  # the last block of row 2 is not found by anything

    for taken, left in (0, [4, 4, 2]), (1, [4, 4, 2]), (2, [2, 4, 2]), (3, [0, 4, 2]):
        cache.extend(0, 0, 2 * taken)
        found = []
        for token in 1, 2, 3:
            found.append(cache.open(2, [token] * 5, 12))
            cache.close(2)
        assert found == left
        cache.close(0)


def test_layers_with_a_window_keep_what_it_spans_and_no_more() -> None:
    cache = paged(blocks=99, window=3, rows=1, chunk=2, length=100)
    cache.open(0, list(range(50)), 100)
    for start in range(0, 100, 2):
        assert cache.extend(0, start, start + 2)
        assert len(cache.groups[0].held[0]) == start // 2 + 1
        assert sum(block != BIN for block in cache.groups[3].held[0]) == min(2, start // 2 + 1)
    assert len(cache.groups[3].users) == 1 + 3  # the bin, and what one row may hold where its calls begin anywhere


def test_a_fork_takes_no_memory_until_it_is_written_to() -> None:
    cache = paged(blocks=9)
    cache.extend(0, 0, 5)
    cache.fork(0, 1, 5)
    cache.fork(0, 2, 3)
    assert [len(blocks) for blocks in cache.groups[0].held] == [3, 3, 2]
    assert len(cache.groups[0].free) == 9 - 3
    cache.extend(1, 5, 6)
    assert len(cache.groups[0].free) == 9 - 4
    cache.extend(2, 4, 5)  # what lies before is whole and stays shared
    assert len(cache.groups[0].free) == 9 - 5


@pytest.mark.parametrize("kind", ["growing", "paged"])
@torch.inference_mode()
def test_a_call_for_which_no_room_was_made_is_refused(kind: str) -> None:
    cache = CACHES[kind](MODELS["llama"])
    cache.extend(0, 0, 3)
    tokens = token_ids(MODELS["llama"].config, 1, 1)
    for position, cached in (2, cache.rows(0, 1)), (2, cache.rows(0, 1).upto(3)):
        MODELS["llama"](tokens, torch.tensor([[position]]), cached)
    with pytest.raises(UserError, match="position"):
        MODELS["llama"](tokens, torch.tensor([[5]]), cache.rows(0, 1))


def test_a_row_is_not_rolled_back_behind_what_its_windows_hold() -> None:
    cache = paged(blocks=99, window=3)
    for start in 0, 4, 8:
        cache.extend(0, start, start + 4)
    with pytest.raises(UserError, match="does not hold all that is seen from position 3"):
        cache.extend(0, 3, 4)
    with pytest.raises(UserError, match="position 5"):
        cache.extend(1, 5, 6)


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_made_in_inference_mode_is_written_to_outside_of_it(kind: str) -> None:
    model, tokens = MODELS["gemma2"], token_ids(MODELS["gemma2"].config, 1, 4)
    with torch.inference_mode():
        cache = CACHES[kind](model)
        cache.open(0, [1], LENGTH)
        cache.extend(0, 0, 4)
    with torch.no_grad():
        model(tokens, torch.arange(4)[None], cache.rows(0, 1))
        cache.fork(0, 1, 3)
        cache.extend(1, 3, 4)
        cache.move(1, 2)
        cache.reorder([2, 0])
        assert cache.open(1, [1], LENGTH) == 0
