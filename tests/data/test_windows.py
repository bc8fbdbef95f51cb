"""Which window is sample i."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.data.windows import Windows, validation_windows
from onward.errors import UserError

SIZES = st.tuples(st.integers(2, 400), st.integers(1, 40)).filter(lambda s: s[0] > s[1])


@given(size=SIZES, seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_each_epoch_has_every_window_once(size: tuple[int, int], seed: int, epoch: int) -> None:
    tokens, length = np.arange(size[0], dtype=np.uint16), size[1]
    windows = Windows(tokens, length, seed)
    rows = windows.batch(epoch * len(windows), len(windows))
    assert rows.shape == (len(windows), length + 1)
    assert (rows == rows[:, :1] + np.arange(length + 1)).all(), "each is a stretch of the text"
    starts = np.sort(rows[:, 0])
    assert (np.diff(starts) == length).all(), "they follow one another without overlap"
    assert size[0] - len(windows) * length <= 2 * length + 1, "and leave less than two windows out"


@given(size=SIZES, seed=st.integers(0, 5), first=st.integers(0, 500), count=st.integers(1, 9))
def test_a_sample_is_a_function_of_the_seed_and_its_number(
    size: tuple[int, int], seed: int, first: int, count: int
) -> None:
    tokens, length = np.arange(size[0]), size[1]
    together = Windows(tokens, length, seed).batch(first, count)
    alone = [Windows(tokens, length, seed).batch(i, 1)[0] for i in reversed(range(first, first + count))]
    assert np.array_equal(together, alone[::-1])


def test_epochs_and_seeds_differ() -> None:
    tokens = np.arange(1000)
    windows = Windows(tokens, 10, 0)
    assert not np.array_equal(windows.batch(0, len(windows)), windows.batch(len(windows), len(windows)))
    assert not np.array_equal(windows.batch(0, 50), Windows(tokens, 10, 1).batch(0, 50))


@given(size=SIZES)
def test_validation_predicts_every_token_but_the_first_once(size: tuple[int, int]) -> None:
    count, length = size
    rows = validation_windows(np.arange(count, dtype=np.uint16), length)
    targets = rows[:, 1:][rows[:, 1:] >= 0]
    assert sorted(targets) == list(range(1, count))
    inputs = rows[:, :-1]
    known = rows[:, 1:] >= 0
    assert (inputs[known] == rows[:, 1:][known] - 1).all()


@pytest.mark.parametrize("count", [0, 1, 32])
def test_a_text_shorter_than_one_window_is_one_sentence(count: int) -> None:
    with pytest.raises(UserError, match=rf"{count} tokens.*33"):
        Windows(np.arange(count), 32, 0)
    assert len(Windows(np.arange(33), 32, 0)) == 1


def test_any_seed_will_do() -> None:
    samples = [Windows(np.arange(1000), 10, seed).batch(0, 50) for seed in (-1, 1, 2**63)]
    assert not np.array_equal(samples[0], samples[1])
