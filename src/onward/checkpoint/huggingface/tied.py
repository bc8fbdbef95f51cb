"""Heads that config.json ties to the embedding, although the files hold another head."""

import warnings
from collections.abc import Mapping

import torch

from onward.checkpoint.names import rows
from onward.checkpoint.weights import COPY_BYTES, FLOATS, StoredTensor
from onward.config.decoder import DecoderConfig
from onward.families import Names


class UntiedHead(UserWarning):
    """Warning that config.json ties the head to the embedding, although their stored weights differ."""


def both_names(family: Names, config: DecoderConfig) -> list[str]:
    """The names of embedding and head in a family's files."""
    outline = torch.empty(config.vocab_size, config.d_embed, device="meta")
    table = rows(family, config, {"embed.weight": outline, "head.weight": outline})
    theirs = {ours[0]: str(their) for their, ours, *_ in table}
    return [theirs["embed.weight"], theirs["head.weight"]]


def found(family: Names, name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    return stored.get(name, stored.get(name.removeprefix(family.BASE)))


def with_embedding(family: Names, config: DecoderConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored tensors; a matrix that embedding and head share gets the name of the embedding, because files may
    store it under the head's name only."""
    embedding, head = both_names(family, config)
    if found(family, embedding, stored) or not (shared := found(family, head, stored)):
        return stored
    return {**stored, embedding: shared}


def head_differs(family: Names, config: DecoderConfig, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether the files hold a head that differs from the embedding, although config.json ties both; warns if so."""
    names = both_names(family, config)
    pair = [found(family, name, stored) for name in names]
    if None in pair or equal(*pair):  # type: ignore[arg-type]
        return False
    warnings.warn(
        f"config.json ties the head to the embedding, although {names[1]} differs from {names[0]} in the weights: both "
        "are kept, as in transformers; set tie_word_embeddings to false if this is intended",
        UntiedHead,
        stacklevel=1,
    )
    return True


def equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two matrices are equal, compared in pieces to save memory."""
    if one.shape != other.shape or len(one.shape) != 2 or not {one.dtype, other.dtype} <= FLOATS.keys():
        return False
    dtype = torch.promote_types(FLOATS[one.dtype], FLOATS[other.dtype])
    step = max(1, COPY_BYTES // max(1, one.shape[1] * dtype.itemsize))
    spans = [(start, min(start + step, one.shape[0])) for start in range(0, one.shape[0], step)]
    return all(torch.equal(one.rows(*span).to(dtype), other.rows(*span).to(dtype)) for span in spans)
