"""Ways to run a model: each takes tokens (2, LENGTH) and returns the same logits as the plain run, computed
differently."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from onward import BlockManager, CacheManager, Decoder, DecoderConfig, KVCache, PagedKVCache, UserError
from onward.config.decoder import each

from support.decoders import LENGTH, assert_close, decoder, token_ids


def positions(tokens: Tensor, start: int = 0) -> Tensor:
    return torch.arange(start, start + tokens.size(1)).expand_as(tokens)


def new_cache(model: Decoder, chunk: int, kind: str = "contiguous") -> CacheManager:
    """The manager of a cache of this kind for 2 rows of LENGTH tokens."""
    options: dict[str, Any] = {
        "dtype": model.embed.weight.dtype,
        "quantized": kind.startswith("quantized"),
        "device": model.device,
        "keep": min(chunk, 4),
    }
    if kind.endswith("paged"):
        return BlockManager(PagedKVCache(model.config, 2, LENGTH, chunk, blocks=LENGTH, block_size=2, **options))
    return CacheManager(KVCache(model.config, 2, LENGTH, chunk, step=3 if kind == "growing" else 0, **options))


def feed(
    model: Decoder,
    manager: CacheManager,
    tokens: Tensor,
    starts: int | list[int],
    lengths: list[int] | None = None,
    row: int = 0,
    upto: bool = False,
) -> Tensor:
    """Logits of tokens (B, T) in the rows of a cache from `row` on; row i begins at its position in `starts`, and
    `lengths` do not count padding."""
    rows, width = tokens.shape
    starts = [starts] * rows if isinstance(starts, int) else starts
    for i, (start, length) in enumerate(zip(starts, lengths or [width] * rows), row):
        assert manager.reserve(i, start, start + length)
    where = torch.tensor(starts)[:, None] + torch.arange(width)
    counts = torch.tensor(lengths) if lengths else None
    return model(tokens, where, manager.cache.view(row, row + rows, int(where.max()) + 1 if upto else None, counts))


def in_steps(model: Decoder, tokens: Tensor, kind: str, chunk: int, upto: bool = False) -> Tensor:
    cache = new_cache(model, chunk, kind)
    return torch.cat([feed(model, cache, tokens[:, s : s + chunk], s, upto=upto) for s in range(0, LENGTH, chunk)], 1)


def row_by_row(model: Decoder, tokens: Tensor, kind: str) -> Tensor:
    """Each row has its own view of one cache, and its own step size."""
    cache = new_cache(model, 5, kind)
    pieces: list[list[Tensor]] = [[], []]
    for start in range(LENGTH):
        for row, step in (0, 5), (1, 3):
            if start % step == 0:
                piece = tokens[row : row + 1, start : start + step]
                pieces[row].append(feed(model, cache, piece, start, row=row))
    return torch.cat([torch.cat(p, 1) for p in pieces])


def rolled_back(model: Decoder, tokens: Tensor, kind: str) -> Tensor:
    """Other tokens are cached first, then rolled back and replaced by the right ones."""
    cache, out = new_cache(model, 4, kind), []
    for start in range(0, LENGTH, 2):
        feed(model, cache, tokens[:, start : start + 4].flip(0, 1), start)
        out.append(feed(model, cache, tokens[:, start : start + 2], start))
    return torch.cat(out, 1)


def reused(model: Decoder, tokens: Tensor, kind: str) -> Tensor:
    """The rows contained other texts before."""
    cache, out = new_cache(model, 5, kind), []
    for texts in tokens.flip(1), tokens:
        for row in 0, 1:
            cache.free(row)
            assert cache.allocate(row, texts[row].tolist(), LENGTH) == 0
        out = [feed(model, cache, texts[:, s : s + 5], s) for s in range(0, LENGTH, 5)]
    return torch.cat(out, 1)


def ragged(model: Decoder, tokens: Tensor, kind: str) -> Tensor:
    """Rows of 8 and 5 tokens, then of 4 and 7; the shorter row is padded on the right, at the end beyond the context
    length."""
    cache, padded = new_cache(model, 8, kind), torch.cat([tokens, tokens.flip(1)], 1)
    first = padded[:, :8].clone()
    first[1, 5:] = 0
    a = feed(model, cache, first, 0, [8, 5])
    b = feed(model, cache, torch.stack([padded[0, 8:15], padded[1, 5:12]]), [8, 5], [4, 7])
    return torch.stack([torch.cat([a[0], b[0, :4]]), torch.cat([a[1, :5], b[1]])])


def packed(model: Decoder, tokens: Tensor) -> Tensor:
    """Both rows as documents packed into one row."""
    return model(tokens.view(1, -1), positions(tokens).reshape(1, -1)).view(2, LENGTH, -1)


def branched(model: Decoder, tokens: Tensor) -> Tensor:
    """Both rows in one row, each as the second branch of a document with which it shares some tokens."""
    where, rows, at = positions(tokens)[0], list[Tensor](), list[Tensor]()
    for row, cut in zip(tokens, (7, 4)):
        rows += [row[:cut], row.flip(0)[cut:], row.roll(1)[cut:], row[cut:]]
        at += [where, where[cut:], where[cut:]]
    pieces = model(torch.cat(rows)[None], torch.cat(at)[None])[0].split([len(piece) for piece in rows])
    return torch.stack([torch.cat([pieces[0], pieces[3]]), torch.cat([pieces[4], pieces[7]])])


def from_vectors(model: Decoder, tokens: Tensor) -> Tensor:
    return model(model.embed(tokens))


CACHED: dict[str, Callable[[Decoder, Tensor, str], Tensor]] = {  # the third argument is the kind of cache
    "one by one": partial(in_steps, chunk=1),
    "in chunks": partial(in_steps, chunk=5),
    "in chunks that read only the slots in use": partial(in_steps, chunk=5, upto=True),
    "row by row": row_by_row,
    "rolled back": rolled_back,
    "in rows used before": reused,
    "ragged": ragged,
}


def with_cache(name: str, kind: str) -> Callable[[Decoder, Tensor], Tensor]:
    return lambda model, tokens: CACHED[name](model, tokens, kind)


WAYS: dict[str, Callable[[Decoder, Tensor], Tensor]] = {
    "packed": packed,
    "branched": branched,
    "from vectors": from_vectors,
    **{name: with_cache(name, "contiguous") for name in CACHED},
    **{f"{name}, paged": with_cache(name, "paged") for name in ("one by one", "rolled back", "ragged")},
}


@torch.inference_mode()
def assert_equals_the_plain_run(config: DecoderConfig, way: str) -> None:
    model, tokens = decoder(config), token_ids(config)
    if way == "branched" and any(part.states(config) for part in each(config.attention)):
        with pytest.raises(UserError, match="Cannot compute branches of a document in one row with recurrent layers"):
            WAYS[way](model, tokens)
        return
    if way == "from vectors" and model.layer_inputs is not None:
        with pytest.raises(UserError, match="Cannot take vectors in place of token ids, because each layer embeds the"):
            WAYS[way](model, tokens)
        return
    assert_close(WAYS[way](model, tokens), model(tokens))
