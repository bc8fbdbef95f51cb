"""The window at each index of the training order."""

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import Batch, Tokens, UserError, ValidationWindows, Windows
from onward.data import IGNORE_INDEX
from onward.data.curricula import BLOCK
from onward.data.tokens import Span
from onward.data.windows import SHIFTING, hashed, permuted
from onward.training.step.plans import take

SIZES = st.tuples(st.integers(2, 400), st.integers(1, 40)).filter(lambda s: s[0] > s[1])
LENGTHS = st.lists(st.integers(1, 30), min_size=2, max_size=12)  # lengths of documents in tokens
PACKS = st.sampled_from(["stream", "documents"])


def text(count: int, first: int = 0) -> Tokens:
    """A text whose token ids count up from `first`."""
    return Tokens.of(np.arange(first, first + count, dtype=np.uint32))


def sharded(lengths: Sequence[int], shard: int) -> Tokens:
    """Documents of these lengths in shards of `shard` tokens; each token id equals its index."""
    ids, ends, spans = np.arange(sum(lengths), dtype=np.uint32), np.cumsum(lengths), []
    for first in range(0, len(ids), shard):
        inside = ends[(ends > first) & (ends <= first + shard)] - first
        part = ids[first : first + shard]
        arrays: list[Any] = [lambda a=a: a for a in (part, inside.astype(np.uint64))]
        spans.append(Span(arrays[0], arrays[1], 0, len(part), opens=first == 0))
    return Tokens(spans)


def arrays(batch: Batch) -> list[np.ndarray | None]:
    return [None if part is None else part.numpy() for part in (batch.tokens, batch.targets, batch.positions)]


def starts(batch: Batch) -> np.ndarray:
    return batch.tokens[:, 0].numpy()


@given(count=st.integers(1, 3000) | st.integers(1, 30), key=st.integers(0, 2**64 - 1))
def test_a_key_permutes_a_range_of_any_size(count: int, key: int) -> None:
    x = np.arange(count, dtype=np.uint64)
    assert sorted(permuted(x, np.full_like(x, count), np.full_like(x, key))) == list(range(count))


@pytest.mark.parametrize("count", [2, 5, 6, 10, 30])
def test_permutations_of_many_keys_are_even(count: int) -> None:
    """Each item occurs at each index, and after each other item, about equally often."""
    keys = hashed(np.arange(40_000, dtype=np.uint64))
    sizes = np.full_like(keys, count)
    places = [permuted(np.full_like(keys, i), sizes, keys).astype(int) for i in range(count)]
    pairs = np.zeros((count, count))
    for one, other in pairwise(places):
        np.add.at(pairs, (one, other), 1)
    for found in [np.bincount(p, minlength=count) for p in places] + [pairs[~np.eye(count, dtype=bool)]]:
        squares, free = ((found - found.mean()) ** 2 / found.mean()).sum(), len(found) - 1
        assert squares < free + 5 * np.sqrt(2 * free), "chi squared"


@given(size=SIZES, seed=st.integers(0, 5), epoch=st.integers(0, 3), parts=st.integers(1, 3))
def test_each_epoch_has_every_window_of_all_sources_once(
    size: tuple[int, int], seed: int, epoch: int, parts: int
) -> None:
    count, length = size
    whole = text(count)
    windows = Windows([whole.part(i * count // parts, (i + 1) * count // parts) for i in range(parts)], length, seed)
    sample = windows.read(range(epoch * len(windows), (epoch + 1) * len(windows)))
    assert sample.positions is None
    assert bool((sample.targets == sample.tokens + 1).all()), "the target is the next token"
    assert (arrays(sample)[0] == starts(sample)[:, None] + np.arange(length)).all(), "each is a part of the text"
    assert (np.diff(np.sort(starts(sample))) == length).all(), "windows follow one another without overlap"
    targets, fitting = count - 1, (count - 1) // length
    if fitting < SHIFTING:
        assert len(windows) == fitting, "all windows that fit"
    else:
        assert len(windows) * length / targets > (fitting - 1) / (fitting + 1), "nearly all targets are covered"


@given(
    size=SIZES,
    seed=st.integers(-3, 3),
    indices=st.lists(st.integers(0, 10**12), min_size=1, max_size=9),
    weights=st.sampled_from([(), (1.0, 2.0)]),
    pack=PACKS,
)
def test_a_sample_is_a_function_of_the_seed_and_its_number(size, seed, indices, weights, pack) -> None:
    count, length = size
    fresh = lambda: Windows([text(count), text(count, count)], length, seed, weights=weights, pack=pack)
    together = arrays(fresh().read(indices))
    for row in reversed(range(len(indices))):
        for alone, part in zip(arrays(fresh().read(indices[row : row + 1])), together, strict=True):
            assert part is None if alone is None else np.array_equal(alone, part[row : row + 1])


def test_epochs_are_shuffled_and_cut_elsewhere_and_seeds_differ() -> None:
    found = {}
    for seed in (-1, 0, 1, 2**63):
        windows = Windows([text(10_000)], 10, seed)
        for epoch in range(8):
            order = starts(windows.read(range(epoch * len(windows), (epoch + 1) * len(windows))))
            assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.15
            assert not found or min(np.mean(order != other) for other in found.values()) > 0.9
            found[seed, epoch] = order
    assert len({order[0] % 10 for order in found.values()}) > 5


@pytest.mark.parametrize(("count", "length"), [(33, 32), (34, 32), (95, 32), (96, 32), (97, 32), (130, 32), (64, 1)])
def test_every_token_is_seen_sooner_or_later(count: int, length: int) -> None:
    windows = Windows([text(count)], length, 0)
    sample = windows.read(range(400 * len(windows)))
    assert {*sample.tokens.flatten().tolist()} | {*sample.targets.flatten().tolist()} == {*range(count)}


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (1, 1, 1), (5, 3, 1e-3)])
def test_weights_are_exact_in_every_block_and_near_at_every_place(weights: tuple[float, ...]) -> None:
    windows = Windows([text(900, i * 1000) for i in range(3)], 4, 0, weights=weights)
    exact = np.array(weights) / sum(weights)
    for block in 0, 7:
        source = starts(windows.read(range(block * BLOCK, (block + 1) * BLOCK))) // 1000
        counts = (source[:, None] == np.arange(3)).cumsum(0)
        assert np.abs(counts[-1] - exact * BLOCK).max() < 1
        assert np.abs(counts - exact * np.arange(1, BLOCK + 1)[:, None]).max() <= 0.5 + exact.max() * 3 / 2 + 1


def test_with_weights_each_source_has_its_own_epochs() -> None:
    windows = Windows([text(41), text(2000, 1000)], 4, 3, weights=(2, 1))
    assert len(windows) == 9 + 498
    found = starts(windows.read(range(BLOCK + 3000)))
    for here, count in (found[found < 1000], 9), (found[found >= 1000], 498):
        epochs = here[: len(here) // count * count].reshape(-1, count)
        assert len(epochs) > 5
        assert (np.diff(np.sort(epochs), axis=1) == 4).all()
    found = starts(Windows([text(2000), text(2000, 2000)], 4, 3, weights=(1, 1)).read(range(900)))
    assert np.mean(found[found < 2000] == found[found >= 2000] - 2000) < 0.1, "each source has its own order"


def plain(lengths: Sequence[int], first: int, length: int) -> tuple[list[int], list[int], list[int]]:
    """The tokens, targets and positions of a window that begins at token `first`, computed token by token."""
    document = [number for number, size in enumerate(lengths) for _ in range(size)]
    tokens, targets, positions = [], [], []
    for i in range(first, first + length):
        there = i < len(document)
        tokens.append(i if there else 0)
        targets.append(i + 1 if i + 1 < len(document) and document[i + 1] == document[i] else IGNORE_INDEX)
        begins = i == first or (there and document[i] != document[i - 1])
        positions.append(0 if begins else positions[-1] + 1)
    return tokens, targets, positions


def assert_plain(batch: Batch, lengths: Sequence[int], length: int) -> None:
    for tokens, targets, positions in zip(*arrays(batch)):
        assert (tokens.tolist(), targets.tolist(), positions.tolist()) == plain(lengths, int(tokens[0]), length)


@given(lengths=LENGTHS, shard=st.integers(1, 40), length=st.integers(1, 50), seed=st.integers(0, 3))
def test_packed_documents_have_the_positions_and_targets_of_plain_ones(
    lengths: list[int], shard: int, length: int, seed: int
) -> None:
    tokens = sharded(lengths, shard)
    if len(tokens) > length:
        windows = Windows([tokens], length, seed, pack="documents")
        assert_plain(windows.read(range(3 * len(windows))), lengths, length)
    held = ValidationWindows(tokens, length, "documents")
    assert_plain(held.read(range(len(held))), lengths, length)


def test_a_document_ends_where_its_source_does() -> None:
    joined = Windows([text(5), text(6, 5)], 10, 0, pack="documents").read([0])
    assert_plain(joined, [5, 6], 10)


@given(size=SIZES, batch=st.integers(1, 9), pack=PACKS)
def test_validation_predicts_every_token_but_the_first_once(size: tuple[int, int], batch: int, pack) -> None:
    count, length = size
    windows = ValidationWindows(text(count), length, pack)
    batches = list(windows.batches(batch))
    assert [len(b.tokens) for b in batches[:-1]] == [batch] * (len(batches) - 1)
    assert sum(len(b.tokens) for b in batches) == len(windows)
    tokens, targets = (np.concatenate([arrays(b)[part] for b in batches]) for part in (0, 1))
    known = targets >= 0
    assert sorted(targets[known]) == list(range(1, count))
    assert known.any(1).all(), "each window has a target"
    assert (tokens[known] == targets[known] - 1).all()
    assert (tokens >= 0).all(), "token ids are valid also where the text has ended"


def test_no_memory_grows_with_the_text() -> None:
    endless = Tokens.of(np.broadcast_to(np.uint16(7), 10**14))
    tracemalloc.start()
    for tokens in endless, Tokens.join([endless.part(0, 10**13), endless]):
        windows = Windows([tokens, endless], 1024, 0, weights=(1, 2))
        assert windows.read([0, 10**11, 10**15]).tokens.shape == (3, 1024)
        held = ValidationWindows(tokens, 1024)
        assert next(held.batches(4)).tokens.shape == held.read([0, 1, 2, len(held) - 1]).tokens.shape == (4, 1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


@pytest.mark.parametrize("count", [0, 1, 32])
@pytest.mark.parametrize("weights", [(), (1, 1)])
def test_a_text_shorter_than_one_window_is_one_sentence(count: int, weights: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match=rf"{count} tokens.*33"):
        Windows([text(count), text(0 if not weights else 100)], 32, 0, weights=weights)
    assert len(Windows([text(20), text(13)], 32, 0)) == 1


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ((1, 2, 3), "3 weights for 2 sources"),
        *((w, "positive, and above 1/10,000") for w in [(1, 0), (1, -1), (-1, -1), (9e6, 1), (1, np.nan), (1, np.inf)]),
    ],
)
def test_weights_that_do_not_fit_are_one_sentence(weights: tuple[float, ...], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Windows([text(50), text(50)], 4, 0, weights=weights)


@given(
    position=st.integers(0, 60),
    number=st.integers(0, 30),
    skipped=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 12)).map(lambda s: (s[0], sum(s))), max_size=5),
)
def test_take_leaves_out_what_is_skipped(position: int, number: int, skipped: list[tuple[int, int]]) -> None:
    out = {i for first, end in skipped for i in range(first, end)}
    taken, behind = take(position, number, skipped)
    assert taken == [i for i in range(position, 200) if i not in out][:number]
    assert behind == (taken[-1] + 1 if taken else position)
    again, end = take(position, number // 2, skipped)
    rest, end = take(end, number - number // 2, skipped)
    assert (again + rest, end) == (taken, behind), "the same in two calls"
