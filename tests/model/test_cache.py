"""Invariants of the KV cache."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onward import CacheManager, KVCache, LatentAttention, Learned, PagedKVCache, SelfAttention
from onward.model.cache_codes import quantize

from support.decoders import DECODERS, assert_close, config, decoder, token_ids
from support.devices import device

ROWS, LENGTH, CHUNK = 3, 12, 4


def test_layers_have_length_or_window_plus_chunk_slots() -> None:
    c = config(n_layers=3, n_kv_heads=2, attention=(SelfAttention(window=3), SelfAttention(), SelfAttention(window=99)))
    cache = KVCache(c, ROWS, LENGTH, CHUNK, dtype=torch.bfloat16, device=device())
    assert [layer.slots for layer in cache.layers] == [3 + CHUNK, LENGTH + CHUNK, LENGTH + CHUNK]
    assert cache.layers[0].entries["k"].shape == (ROWS, 3 + CHUNK, c.n_kv_heads, c.d_head)


WINDOWS = config(n_kv_heads=2, attention=(SelfAttention(window=3), SelfAttention()))  # 2 * 2 * 4 numbers per token
LATENTS = config(attention=LatentAttention(d_latent=40, d_rope=6))  # 46 numbers per token
MEMORY = {  # a cache, and its size: rows times slots times bytes of an entry, summed over layers
    "windows": (
        lambda: KVCache(WINDOWS, 3, 12, 4, dtype=torch.bfloat16, device=device()),
        3 * (7 * 16 * 2 + 16 * 16 * 2),
    ),
    "in fp32": (lambda: KVCache(WINDOWS, 3, 12, 4, device=device()), 3 * (7 * 16 * 4 + 16 * 16 * 4)),
    "latents": (lambda: KVCache(LATENTS, 3, 12, 4, dtype=torch.float16, device=device()), 2 * 3 * 16 * 46 * 2),
    "growing": (
        lambda: KVCache(WINDOWS, 3, 12, 4, step=5, dtype=torch.bfloat16, device=device()),
        3 * (5 * 16 * 2 + 5 * 16 * 2),
    ),
    "quantized": (  # 4 vectors of 4 numbers
        lambda: KVCache(WINDOWS, 3, 12, 4, quantized=True, dtype=torch.bfloat16, device=device()),
        3 * (7 * 4 * (4 + 2) + 16 * 4 * (4 + 2)),
    ),
    "quantized latents": (
        lambda: KVCache(LATENTS, 3, 12, 4, quantized=True, device=device()),
        2 * 3 * 16 * (46 + 2 * 4),
    ),
    "paged": (  # two blocks more, null and padding; windows need at most 3 * 4 blocks
        lambda: PagedKVCache(WINDOWS, 3, 12, 4, blocks=19, block_size=2, dtype=torch.bfloat16, device=device()),
        (2 + 3 * 4) * 2 * 16 * 2 + (2 + 19) * 2 * 16 * 2,
    ),
    "quantized, paged": (
        lambda: PagedKVCache(LATENTS, 3, 12, 4, blocks=19, block_size=2, quantized=True, device=device()),
        2 * (2 + 19) * 2 * (46 + 2 * 4),
    ),
}


@pytest.mark.parametrize("kind", MEMORY)
def test_cache_memory_is_entries_times_slots_times_bytes(kind: str) -> None:
    make, wanted = MEMORY[kind]
    cache = make()
    assert cache.nbytes() == wanted
    assert sum(t.untyped_storage().nbytes() for layer in cache.layers for t in layer.entries.values()) == wanted


def test_token_takes_2_layers_kv_heads_d_head_numbers() -> None:
    gpt2_large = config(n_layers=36, d_model=1280, n_heads=20, context_length=1024)
    grouped = config(n_layers=5, n_heads=8, n_kv_heads=2, d_head=6)
    for c, dtype in (gpt2_large, torch.bfloat16), (grouped, torch.float32):
        per_token = 2 * c.n_layers * c.n_kv_heads * c.d_head * dtype.itemsize
        for rows, length, chunk in (1, 1024, 0), (1, 1024, 1), (3, 100, 8):
            cache = KVCache(c, rows, length, chunk, device="meta", dtype=dtype)
            assert cache.nbytes() == rows * (length + chunk) * per_token
    without_room_for_a_chunk = KVCache(gpt2_large, 1, 1024, 0, device="meta", dtype=torch.float16)
    assert without_room_for_a_chunk.nbytes() == 188_743_680


def test_growing_cache_gets_slots_in_steps() -> None:
    cache = KVCache(WINDOWS, ROWS, LENGTH, CHUNK, step=5, device=device())
    # one slot is for padding
    wanted = {0: (5, 5), 4: (5, 5), 5: (7, 10), 9: (7, 10), 10: (7, 15), 3: (7, 15), 12: (7, 15)}
    for end, slots in wanted.items():
        assert CacheManager(cache).reserve(0, max(0, end - 1), end)
        assert tuple(layer.slots for layer in cache.layers) == slots


@given(
    numbers=st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    wide=st.booleans(),
)
def test_quantized_vector_is_within_half_a_step_of_the_exact_one(numbers, dtype, wide) -> None:  # type: ignore[no-untyped-def]
    vector = torch.tensor([numbers], dtype=torch.float32 if wide else dtype)
    codes, scale = quantize(vector, dtype)
    assert codes.dtype == torch.int8
    assert scale.dtype == dtype
    error = (codes.double() * scale.double() - vector.double()).abs().max()
    assert error <= scale.double().item() * (0.5 + 1e-4)
    assert scale.double() <= vector.double().abs().max() / 127 * 1.01 + torch.finfo(dtype).tiny  # a fine step


def test_quantized_nan_stays_nan() -> None:
    for odd in torch.nan, torch.inf:
        codes, scale = quantize(torch.tensor([1.0, odd]), torch.float32)
        assert not (codes * scale).isfinite().all()


def test_views_share_the_memory_of_the_cache() -> None:
    cache = KVCache(DECODERS["llama"], ROWS, LENGTH, CHUNK, device=device())
    view = cache.view(1, 2, 5)
    view.layers[0].entries["k"].fill_(1)
    k = cache.layers[0].entries["k"]
    assert k[1, :5].all()
    assert k.sum() == k[1, :5].numel()


MODELS = [decoder(DECODERS[name]) for name in ("gemma2", "alibi in windows", "everything about scores")]


@given(model=st.sampled_from(MODELS), data=st.data())
@torch.inference_mode()
def test_interleaved_chunks_and_roll_backs_equal_the_plain_run(model, data) -> None:  # type: ignore[no-untyped-def]
    cache = KVCache(model.config, ROWS, LENGTH, CHUNK, device=device())
    texts: list[list[int]] = [[] for _ in range(ROWS)]
    furthest = [0] * ROWS  # end of the slots written so far in each row, including padding
    for _ in range(data.draw(st.integers(1, 8), "calls")):
        fresh = []
        for row, text in enumerate(texts):
            if data.draw(st.integers(0, 9)) == 0:  # the row is used for another request
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
        logits = model(tokens, positions, cache.view(length=end) if data.draw(st.booleans(), "upto") else cache)
        for row, (text, new) in enumerate(zip(texts, fresh)):
            furthest[row] = max(furthest[row], len(text) + width)
            text += new
            assert_close(logits[row, : len(new)], model(torch.tensor([text]))[0, -len(new) :])


on_the_cpu = pytest.mark.skipif(device().type != "cpu", reason="elsewhere checking positions would force a sync")


def call(positions: list[int] | None, view: str = "whole") -> None:
    model = decoder(DECODERS["llama"])
    cache = KVCache(model.config, 1, LENGTH, CHUNK, device=device())
    seen = {"whole": cache.view(), "upto": cache.view(length=6)}[view]
    tokens = token_ids(model.config, 1, len(positions or [0]))
    model(tokens, None if positions is None else torch.tensor([positions]), seen)


@on_the_cpu
@pytest.mark.parametrize(
    ("positions", "view", "message"),
    [
        (None, "whole", "give the positions"),
        ([0, 1, 2, 3, 4], "whole", "5 tokens in one call to a cache made for 4"),
        ([12], "whole", "position 12 is outside the 12"),
        ([-1], "whole", "position -1 is outside"),
        ([6], "upto", "position 6 is outside the 6"),
        ([5, 6], "upto", "position 6, padding included"),
    ],
)
def test_call_outside_the_cache_is_a_value_error(positions: list[int] | None, view: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(positions, view)


def test_padding_may_lie_past_the_length() -> None:
    call([11, 12, 13, 14])


@on_the_cpu
@pytest.mark.parametrize("positions", [None, torch.arange(13)[None]])
def test_positions_beyond_the_learned_ones_are_a_value_error(positions: torch.Tensor | None) -> None:
    model = decoder(config(position=Learned()))
    with pytest.raises(ValueError, match="position 12 is outside the 12"):
        model(token_ids(model.config, 1, 13), positions)
    assert decoder(DECODERS["llama"])(token_ids(model.config, 1, 50)).isfinite().all()  # rotary positions have no limit
