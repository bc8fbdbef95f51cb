"""Every kind of cache gives what the plain model gives, whatever is done with its rows."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from decoders import DECODERS, LENGTH, assert_close, config, decoder, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import CHUNK, ROWS, Program
from ways import CACHED

from onward.errors import UserError
from onward.model.cache import Cache
from onward.model.config import LatentAttention, SelfAttention
from onward.model.decoder import Decoder
from onward.model.paged import BIN, Blocks, PagedCache

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
@pytest.mark.parametrize("kind", ["growing", "paged", "quantised", "quantised paged"])
@torch.inference_mode()
def test_every_way_gives_the_logits_of_the_plain_run_with_every_cache(config, kind) -> None:  # type: ignore[no-untyped-def]
    model, tokens = decoder(config), token_ids(config)
    plain = model(tokens)
    for way in CACHED.values():
        assert_close(way(model, tokens, kind), plain, 0.05 if "quantised" in kind else 1e-5)


@pytest.mark.parametrize("kind", CACHES)
@given(name=st.sampled_from(NAMES), random=st.randoms(use_true_random=False))
@torch.inference_mode()
def test_rows_that_come_go_branch_and_share_equal_the_plain_run(kind, name, random) -> None:  # type: ignore[no-untyped-def]
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
    "rows of other horizons share": ("rotation_key", lambda config, horizon: b""),
}


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
        for seed in range(40):
            for name in "gemma2", "scaled turns", "everything about scores":
                Program(MODELS[name], CACHES["paged"](MODELS[name]), Random(seed)).run(40)
