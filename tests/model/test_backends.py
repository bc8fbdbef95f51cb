"""Every attention backend computes the same result as the reference."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from onward import Alibi, BlockManager, CacheManager, DecoderConfig, KVCache, PagedKVCache, Rotary, SelfAttention
from onward.config.decoder import at
from onward.kernels import operations
from onward.model import AttentionContext
from onward.model import attention as backends
from onward.model.context import attention_contexts
from onward.model.flex import flex
from onward.model.mask import AttentionMask
from onward.model.reference import reference
from onward.parallel.masks import part

from support.decoders import DECODERS, assert_close
from support.devices import device

PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 0, 1, 2, 0, 1]])
# rows with several completions of one prompt
BRANCHED = torch.tensor([[0, 1, 2, 3, 4, 2, 3, 3, 4], [0, 1, 2, 1, 0, 1, 2, 1, 2]])
LAYERS = [
    (name, layer)
    for name, config in DECODERS.items()
    for layer in range(config.n_layers)
    if isinstance(at(config.attention, layer), SelfAttention)
]
BACKENDS: dict[str, Callable[..., Tensor]] = {
    "sdpa": backends.sdpa,
    "sdpa in blocks of 2 queries": partial(backends.sdpa_blocks, block=2),
    "sdpa in blocks of 4 queries": partial(backends.sdpa_blocks, block=4),
    "sdpa in one block": backends.sdpa_blocks,
    "flex": flex,
    "the chosen one": backends.attend,
}
QUIET = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def vectors(config: DecoderConfig, tokens: int, rows: int = 2, layer: int = 0) -> list[Tensor]:
    """Random queries, keys and values."""
    torch.manual_seed(1)
    n_heads, n_kv_heads, d_head, d_value = at(config.attention, layer).heads(config)
    shapes = (n_heads, d_head), (n_kv_heads, d_head), (n_kv_heads, d_value)
    return [torch.randn(rows, tokens, *shape) for shape in shapes]


@QUIET
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=[pytest.mark.long] * (name == "flex")) for name in BACKENDS]
)
@pytest.mark.parametrize("positions", [PACKED, BRANCHED, None], ids=["packed", "branched", "plain"])
@torch.inference_mode()
def test_backend_equals_the_reference_without_a_cache(backend: str, positions: Tensor | None) -> None:
    for name, layer in LAYERS:
        config = DECODERS[name]
        where = torch.arange(9)[None] if positions is None else positions
        mask = attention_contexts(config, torch.float32, where, None, plain=positions is None)[layer].mask
        q, k, v = vectors(config, 9)
        wanted = reference(q, k, v, mask, scale=0.3)
        assert_close(BACKENDS[backend](q, k, v, mask, scale=0.3), wanted, 1e-5)


@pytest.mark.long
@QUIET
@pytest.mark.parametrize("positions", [PACKED, BRANCHED, None], ids=["packed", "branched", "plain"])
@torch.inference_mode()
def test_part_of_the_queries_has_the_attention_of_the_whole(positions: Tensor | None) -> None:
    for name, layer in LAYERS:
        where = torch.arange(9)[None] if positions is None else positions
        mask = attention_contexts(DECODERS[name], torch.float32, where, None, plain=positions is None)[layer].mask
        q, k, v = vectors(DECODERS[name], 9)
        wanted = reference(q, k, v, mask, scale=0.3)[:, 3:8]
        for backend in BACKENDS.values():
            assert_close(backend(q[:, 3:8], k[:, :8], v[:, :8], part(mask, 3, 8), scale=0.3), wanted, 1e-5)


OPTIONS: Any = {"device": device(), "keep": 5}  # `keep` allows states to be rolled back
CACHES: dict[str, Callable[[DecoderConfig], CacheManager]] = {
    "contiguous": lambda config: CacheManager(KVCache(config, 2, 12, 5, **OPTIONS)),
    "growing": lambda config: CacheManager(KVCache(config, 2, 12, 5, step=3, **OPTIONS)),
    "quantized": lambda config: CacheManager(KVCache(config, 2, 12, 5, quantized=True, **OPTIONS)),
    "paged": lambda config: BlockManager(PagedKVCache(config, 2, 12, 5, blocks=30, block_size=2, **OPTIONS)),
}


def cached(
    manager: CacheManager, config: DecoderConfig, layer: int, dtype: torch.dtype = torch.float32
) -> tuple[AttentionContext, list[Any]]:
    """The attention context of the last of three calls, with its queries and the entries of the cache."""
    q, *keys_values = (t.to(dtype) for t in vectors(config, 11, layer=layer))
    for start, end in (0, 4), (4, 9), (9, 11):
        for row in range(2):
            assert manager.reserve(row, start - row * (start > 0), end - row)
        positions = torch.arange(start, end)[None] - torch.tensor([[0], [1]]) * (start > 0)  # row 1 is one token behind
        view = manager.cache.view(length=11)
        context = attention_contexts(config, torch.float32, positions, view, plain=False)[layer]
        k, v = (t[:, start:end] for t in keys_values)
        entries = context.update(k=k, v=v)
    return context, [q[:, -2:], *entries]


@QUIET
@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(("sdpa", kind) for kind in CACHES),
        *(pytest.param("flex", kind, marks=pytest.mark.long if kind != "paged" else ()) for kind in CACHES),
    ],
)
@torch.inference_mode()
def test_backend_equals_the_reference_with_a_cache(backend: str, kind: str) -> None:
    for name, layer in LAYERS:
        config = DECODERS[name]
        context, inputs = cached(CACHES[kind](config), config, layer)
        q, k, v = inputs
        wanted = reference(q, k, v, context.mask, scale=0.3)
        assert_close(BACKENDS[backend](q, k, v, context.mask, scale=0.3), wanted, 1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@torch.inference_mode()
def test_kernel_in_the_cache_equals_the_reference(
    dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MIN_WORK", 1)
    monkeypatch.setattr(operations, "MIN_PARALLEL", 1)
    monkeypatch.setattr(operations, "COMPILED_AFTER", 0)
    sizes = {"vocab_size": 9, "d_model": 40, "n_layers": 1, "n_heads": 10, "n_kv_heads": 2, "d_head": 36}
    options: dict[str, Any] = {"scale": 0.3, "softcap": 2.0, "sinks": torch.randn(10).to(dtype)}
    for window, position, given in (0, Rotary(), options), (3, Alibi(), {"scale": 0.3}):
        attends = SelfAttention(window=window)
        config = DecoderConfig(**sizes, position=position, attention=attends)  # type: ignore[arg-type]
        for kind in "contiguous", "growing", "paged":
            manager = CACHES[kind](config)
            for cache in manager.cache.layers:
                cache.entries.update({name: entry.to(dtype) for name, entry in cache.entries.items()})
            context, (q, k, v) = cached(manager, config, 0, dtype)
            wanted = reference(q, k, v, context.mask, **given)
            given = {"softcap": None, "sinks": None, **given}
            assert_close(k.attend(q, v, context.mask, **given), wanted, bound)
        q, k, v = (t.to(dtype) for t in vectors(config, 9))
        mask = attention_contexts(config, dtype, torch.arange(9)[None], None, plain=True)[0].mask
        y = backends.without_gathering(q, k, v, mask, **given)
        assert y is not None
        assert_close(y, reference(q, k, v, mask, **given), bound)
        for limit in 0, 1 << 30:  # other biases, packed rows and many keys are left to other backends
            monkeypatch.setattr(backends, "MAX_KEYS", limit)
            packed = attention_contexts(config, dtype, PACKED, None, plain=False)[0].mask
            biased = AttentionMask(torch.arange(9)[None], torch.arange(9)[None], plain=True, slopes=torch.ones(10))
            others = [biased, packed, *[mask] * (not limit)]
            assert not any(backends.without_gathering(q, k, v, other, **given) is not None for other in others)


@torch.inference_mode()
def test_long_packed_rows_never_make_their_whole_bias() -> None:
    config, tokens = DECODERS["llama"], 4096
    positions = torch.arange(tokens)[None] % 500
    context = attention_contexts(config, torch.float32, positions, None, plain=False)[0]
    sizes: list[int] = []
    whole = context.mask.score_bias

    def counted(*args: Any) -> Tensor:
        sizes.append((bias := whole(*args)).numel())
        return bias

    context.mask.score_bias = counted  # type: ignore[method-assign, assignment]
    q, k, v = vectors(config, tokens, rows=1)
    y = backends.attend(q, k, v, context.mask, scale=0.3)
    assert max(sizes) <= backends.QUERY_BLOCK * (backends.QUERY_BLOCK + 500)
    last = slice(tokens - 96, tokens)  # the last document
    alone = attention_contexts(config, torch.float32, torch.arange(96)[None], None, plain=True)[0].mask
    assert_close(y[:, last], reference(q[:, last], k[:, last], v[:, last], alone, scale=0.3), 1e-5)


def test_chosen_backend_has_the_gradients_of_the_reference() -> None:
    for positions in PACKED, BRANCHED, torch.arange(9)[None]:
        results = []
        chosen: list[Callable[..., Tensor]] = [
            reference,
            backends.sdpa,
            partial(backends.sdpa_blocks, block=4),
        ]
        for backend in chosen:
            config = DECODERS["alibi in windows"]
            mask = attention_contexts(config, torch.float64, positions, None, plain=False)[0].mask
            inputs = [t.double().requires_grad_() for t in vectors(config, 9)]
            y = backend(*inputs, mask, scale=0.3)
            results.append(torch.autograd.grad(y.square().sum(), inputs))
        for grads in results[1:]:
            for got, wanted in zip(grads, results[0]):
                assert_close(got, wanted, 1e-10)
