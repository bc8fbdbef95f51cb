"""Ways to run a model: each takes tokens (2, LENGTH) and returns the logits of the plain run in its own manner."""

from collections.abc import Callable

import torch
from decoders import LENGTH, assert_close, decoder, token_ids
from torch import Tensor

from onward.model.cache import Cache
from onward.model.config import DecoderConfig
from onward.model.decoder import Decoder


def positions(tokens: Tensor, start: int = 0) -> Tensor:
    return torch.arange(start, start + tokens.size(1)).expand_as(tokens)


def new_cache(model: Decoder, chunk: int) -> Cache:
    return Cache(model.config, 2, LENGTH, chunk, dtype=model.embed.weight.dtype)


def in_steps(chunk: int, upto: bool = False) -> Callable[[Decoder, Tensor], Tensor]:
    def run(model: Decoder, tokens: Tensor) -> Tensor:
        cache, out = new_cache(model, chunk), []
        for piece in positions(tokens).split(chunk, 1):
            seen = cache.upto(int(piece.max()) + 1) if upto else cache
            out.append(model(tokens.gather(1, piece), piece, seen))
        return torch.cat(out, 1)

    return run


def row_by_row(model: Decoder, tokens: Tensor) -> Tensor:
    """Each row through its own view of one cache, and in steps of its own."""
    cache = new_cache(model, 5)
    pieces: list[list[Tensor]] = [[], []]
    for start in range(LENGTH):
        for row, step in (0, 5), (1, 3):
            if start % step == 0:
                piece = tokens[row : row + 1, start : start + step]
                pieces[row].append(model(piece, positions(piece, start), cache.rows(row, row + 1)))
    return torch.cat([torch.cat(p, 1) for p in pieces])


def rolled_back(model: Decoder, tokens: Tensor) -> Tensor:
    """Other tokens follow, are given up, and the right ones take their place."""
    cache, out = new_cache(model, 4), []
    for start in range(0, LENGTH, 2):
        wrong = tokens[:, start : start + 4].flip(0, 1)
        model(wrong, positions(wrong, start), cache)
        right = tokens[:, start : start + 2]
        out.append(model(right, positions(right, start), cache))
    return torch.cat(out, 1)


def reused(model: Decoder, tokens: Tensor) -> Tensor:
    """The rows belonged to others before."""
    cache = new_cache(model, 5)
    for start in range(0, LENGTH, 5):
        before = tokens.flip(1)[:, start : start + 5]
        model(before, positions(before, start), cache)
    out = [model(tokens[:, s : s + 5], positions(tokens[:, s : s + 5], s), cache) for s in range(0, LENGTH, 5)]
    return torch.cat(out, 1)


def ragged(model: Decoder, tokens: Tensor) -> Tensor:
    """Rows of 8 and 5 tokens, then of 4 and 7, the shorter one padded on the right, at last past the context."""
    cache, padded = new_cache(model, 8), torch.cat([tokens, tokens.flip(1)], 1)
    first = padded[:, :8].clone()
    first[1, 5:] = 0
    a = model(first, positions(first), cache)
    second = torch.stack([padded[0, 8:15], padded[1, 5:12]])
    b = model(second, torch.stack([torch.arange(8, 15), torch.arange(5, 12)]), cache)
    return torch.stack([torch.cat([a[0], b[0, :4]]), torch.cat([a[1, :5], b[1]])])


def packed(model: Decoder, tokens: Tensor) -> Tensor:
    """Both rows as documents in one."""
    return model(tokens.view(1, -1), positions(tokens).reshape(1, -1)).view(2, LENGTH, -1)


def from_vectors(model: Decoder, tokens: Tensor) -> Tensor:
    return model(model.embed(tokens))


WAYS: dict[str, Callable[[Decoder, Tensor], Tensor]] = {
    "one by one": in_steps(1),
    "in chunks": in_steps(5),
    "in chunks that read only the slots in use": in_steps(5, upto=True),
    "row by row": row_by_row,
    "rolled back": rolled_back,
    "in rows used before": reused,
    "ragged": ragged,
    "packed": packed,
    "from vectors": from_vectors,
}


@torch.inference_mode()
def assert_equals_the_plain_run(config: DecoderConfig, way: str) -> None:
    model, tokens = decoder(config), token_ids(config)
    assert_close(WAYS[way](model, tokens), model(tokens))
