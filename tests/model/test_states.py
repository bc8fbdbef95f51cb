"""States of layers in the cache: rows advance, roll back and are copied without touching each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onward import KVCache, UserError
from onward.model.states import StateLayerCache

from support.decoders import assert_close, decoder
from support.devices import device
from support.recurrent import fading

ROWS, LENGTH, CHUNK = 3, 16, 5
MODEL = decoder(fading())


@given(keep=st.integers(0, CHUNK), ragged=st.booleans(), data=st.data())
@torch.inference_mode()
def test_interleaved_ragged_chunks_and_roll_backs_equal_the_plain_run(keep, ragged, data) -> None:  # type: ignore[no-untyped-def]
    cache = KVCache(MODEL.config, ROWS, LENGTH, CHUNK, keep=keep, device=device())
    texts: list[list[int]] = [[] for _ in range(ROWS)]
    furthest = [0] * ROWS  # end of the slots written so far in each row, including padding
    for _ in range(data.draw(st.integers(1, 8), "calls")):
        fresh = []
        for row, text in enumerate(texts):
            if data.draw(st.integers(0, 9)) == 0 or len(text) == LENGTH:  # the row is used for another request
                text.clear()
                furthest[row] = 0
            elif text:
                least = max(1, len(text) - keep, furthest[row] - CHUNK)
                del text[data.draw(st.integers(min(least, len(text)), min(len(text), LENGTH - 1))) :]
            most = min(CHUNK, LENGTH - len(text))
            fresh.append(data.draw(st.lists(st.integers(0, 12), min_size=0 if ragged else most, max_size=most)))
        width = max(1, max(map(len, fresh))) if ragged else min(map(len, fresh))
        fresh = [new[:width] for new in fresh]
        tokens = torch.tensor([new + [0] * (width - len(new)) for new in fresh])
        positions = torch.tensor([len(text) for text in texts])[:, None] + torch.arange(width)
        counts = torch.tensor([len(new) for new in fresh]) if ragged else None
        logits = MODEL(tokens, positions, cache.view(counts=counts))
        for row, (text, new) in enumerate(zip(texts, fresh)):
            furthest[row] = max(furthest[row], len(text) + width)
            text += new
            if new:
                assert_close(logits[row, : len(new)], MODEL(torch.tensor([text]))[0, -len(new) :])


@torch.inference_mode()
def filled(keep: int = 2) -> tuple[KVCache, torch.Tensor]:
    """A cache whose three rows contain 8 tokens each, and these tokens."""
    cache = KVCache(MODEL.config, ROWS, LENGTH, 8, keep=keep, device=device())
    tokens = torch.arange(8 * ROWS).view(ROWS, 8) % 13
    MODEL(tokens, torch.arange(8).expand(ROWS, -1), cache)
    return cache, tokens


@torch.inference_mode()
def test_state_of_a_row_is_saved_restored_and_copied() -> None:
    cache, tokens = filled()
    kept = cache.states.snapshot(0, 7)
    cache.states.copy([2, 0], [0, 2])  # swap rows 0 and 2
    for layer in cache.layers:
        for entry in layer.entries.values():
            entry[[0, 2]] = entry[[2, 0]]
    new, at = torch.tensor([[5], [6], [7]]), torch.full((ROWS, 1), 8)
    swapped = tokens[[2, 1, 0]]
    assert_close(MODEL(new, at, cache)[:, 0], MODEL(torch.cat([swapped, new], 1))[:, -1])
    cache.states.restore(2, 7, kept)
    assert cache.states.holds(2, 7)
    assert not cache.states.holds(2, 8)
    got = MODEL(new[2:], at[2:] - 1, cache.view(2))
    assert_close(got[:, 0], MODEL(torch.cat([tokens[:1, :7], new[2:]], 1))[:, -1])


def test_lost_state_is_refused_by_its_position() -> None:
    cache, _ = filled(keep=1)
    with pytest.raises(UserError, match=r"row 0 has no state after 5 tokens, only after \[7, 8\]"):
        cache.states.snapshot(0, 5)
    if device().type == "cpu":
        with pytest.raises(UserError, match=r"Cannot continue row 0 at position 5, because its state after position 4"):
            MODEL(torch.tensor([[1]] * ROWS), torch.full((ROWS, 1), 5), cache)


def test_layers_without_a_state_cost_nothing() -> None:
    cache, _ = filled(keep=3)
    assert cache.states.nbytes() == 2 * ROWS * 4 * MODEL.config.d_model * 4
    assert [isinstance(layer, StateLayerCache) for layer in cache.view().layers] == [True, False, True, False]
