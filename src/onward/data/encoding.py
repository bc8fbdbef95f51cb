"""Encodes documents to token ids, long documents in passages."""

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from onward.data.formats import split
from onward.text.fast import Encoder, encoder
from onward.text.tokenizer import Tokenizer

PASSAGE_CHARS = 1 << 18  # approximate number of characters encoded at a time


def id_dtype(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def encode(
    tokenizer: Tokenizer, documents: Iterable[str], encode_batch: Encoder | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Encode documents to token ids, (N,) uint16 or uint32, each document followed by the end token, if there is one.
    Also returns the index after each document's last token, (documents,) uint64.

    A document of more than PASSAGE_CHARS characters is encoded in passages that end, if possible, at line breaks; the
    ids stay the same if `Tokenizer.pieces` is exact. `encode_batch` is by default the tokenizer's fastest encoder.
    """
    encode_batch = encode_batch or encoder(tokenizer)
    dtype = np.dtype(id_dtype(tokenizer))
    end = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype)
    ids, ends, count = [end[:0]], [], 0
    for group in document_groups(documents):
        parts = []
        for passage, (_, last) in zip(encode_batch([text for text, _ in group]), group):
            parts += [passage.astype(dtype), end] if last else [passage.astype(dtype)]
            count += len(passage) + len(end) * last
            ends += [count] * last
        ids.append(np.concatenate(parts))
    return np.concatenate(ids), np.array(ends, np.uint64)


def document_groups(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Yield lists of (passage, whether it ends its document), of about PASSAGE_CHARS characters each, to bound the
    memory of encoding."""
    group: list[tuple[str, bool]] = []
    size = 0
    for text in documents:
        *before, last = split(text, PASSAGE_CHARS)
        for passage in (*((part, False) for part in before), (last, True)):
            group.append(passage)
            size += len(passage[0])
            if size >= PASSAGE_CHARS:
                yield group
                group, size = [], 0
    if group:
        yield group
