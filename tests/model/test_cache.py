"""The invariants of the cache."""

import pytest
import torch
from decoders import DECODERS, assert_close, config, decoder, token_ids
from hypothesis import given
from hypothesis import strategies as st

from onward.model.cache import Cache
from onward.model.config import Learned, SelfAttention

ROWS, LENGTH, CHUNK = 3, 12, 4


def test_full_layers_have_length_and_chunk_slots_and_window_layers_window_and_chunk() -> None:
    c = config(n_layers=3, n_kv_heads=2, attention=(SelfAttention(window=3), SelfAttention(), SelfAttention(window=99)))
    cache = Cache(c, ROWS, LENGTH, CHUNK, dtype=torch.bfloat16)
    assert [store.slots for store in cache.layers] == [3 + CHUNK, LENGTH + CHUNK, LENGTH + CHUNK]
    assert cache.layers[0].entries["k"].shape == (ROWS, 3 + CHUNK, c.n_kv_heads, c.d_head)
    assert cache.nbytes() == 2 * 2 * ROWS * (7 + 16 + 16) * c.n_kv_heads * c.d_head


def test_views_share_the_memory_of_the_cache() -> None:
    cache = Cache(DECODERS["llama"], ROWS, LENGTH, CHUNK)
    view = cache.rows(1, 2).upto(5)
    view.layers[0].entries["k"].fill_(1)
    k = cache.layers[0].entries["k"]
    assert k[1, :5].all()
    assert k.sum() == k[1, :5].numel()


MODELS = [decoder(DECODERS[name]) for name in ("gemma2", "alibi in windows", "everything about scores")]


@given(model=st.sampled_from(MODELS), data=st.data())
@torch.inference_mode()
def test_any_interleaving_of_chunks_roll_backs_and_new_rows_equals_the_plain_run(model, data) -> None:  # type: ignore[no-untyped-def]
    cache = Cache(model.config, ROWS, LENGTH, CHUNK)
    texts: list[list[int]] = [[] for _ in range(ROWS)]
    furthest = [0] * ROWS  # the end of what was ever written to each row, pads included
    for _ in range(data.draw(st.integers(1, 8), "calls")):
        fresh = []
        for row, text in enumerate(texts):
            if data.draw(st.integers(0, 9)) == 0:  # the row goes to another request
                text.clear()
                furthest[row] = 0
            else:  # rolled back by up to a chunk
                del text[data.draw(st.integers(max(0, furthest[row] - CHUNK), min(len(text), LENGTH - 1))) :]
            most = min(CHUNK, LENGTH - len(text))
            fresh.append(data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=most)))
        width = max(map(len, fresh))
        tokens = torch.tensor([new + [0] * (width - len(new)) for new in fresh])
        starts = torch.tensor([len(text) for text in texts])
        positions = starts[:, None] + torch.arange(width)
        end = int(positions.max()) + 1
        logits = model(tokens, positions, cache.upto(end) if data.draw(st.booleans(), "upto") else cache)
        for row, (text, new) in enumerate(zip(texts, fresh)):
            furthest[row] = max(furthest[row], len(text) + width)
            text += new
            assert_close(logits[row, : len(new)], model(torch.tensor([text]))[0, -len(new) :])


def call(positions: list[int] | None, view: str = "whole") -> None:
    model = decoder(DECODERS["llama"])
    cache = Cache(model.config, 1, LENGTH, CHUNK)
    cache = {"whole": cache, "upto": cache.upto(6)}[view]
    tokens = token_ids(model.config, 1, len(positions or [0]))
    model(tokens, None if positions is None else torch.tensor([positions]), cache)


@pytest.mark.parametrize(
    ("positions", "view", "message"),
    [
        (None, "whole", "give the positions"),
        ([0, 1, 2, 3, 4], "whole", "5 tokens to a cache made for 4"),
        ([12], "whole", "position 12 is outside the 12"),
        ([-1], "whole", "position -1 is outside"),
        ([6], "upto", "position 6 is outside the 6"),
        ([5, 6], "upto", "position 6, pads included"),
    ],
)
def test_a_call_that_the_cache_cannot_hold_is_refused(positions: list[int] | None, view: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(positions, view)


def test_pads_may_lie_past_the_length() -> None:
    call([11, 12, 13, 14])


@pytest.mark.parametrize("positions", [None, torch.arange(13)[None]])
def test_positions_that_were_not_learned_are_refused(positions: torch.Tensor | None) -> None:
    model = decoder(config(position=Learned()))
    with pytest.raises(ValueError, match="position 12 is outside the 12"):
        model(token_ids(model.config, 1, 13), positions)
    assert decoder(DECODERS["llama"])(token_ids(model.config, 1, 50)).isfinite().all()  # rotary goes on
