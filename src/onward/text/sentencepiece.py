"""SentencePiece's model files (sentencepiece_model.proto), read without the library. Does not import torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from onward.errors import UserError
from onward.text.pieces import CONTROL, NORMAL, USER_DEFINED, Piece, bpe_of_pieces

KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
PIECES, TRAINER, NORMALIZER = 1, 2, 3  # fields of the file


def fields_of(data: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and the values of the fields of a message; a ValueError if it is cut off or none."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("it is cut off")
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            yield number, varint()
            continue
        size = varint() if kind == BYTES else {FIXED64: 8, FIXED32: 4}.get(kind, -1)
        if size < 0 or at + size > len(data):
            raise ValueError("it is cut off")
        value = data[at : at + size]
        at += size
        yield number, struct.unpack("<f", value)[0] if kind == FIXED32 else value


def read_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, str | None, str | None]:
    """The tokenizer in a SentencePiece file, and its tokens that begin and end a text.

    A UserError if it is none, or of a kind that would not be equal.
    """
    try:
        whole = list(fields_of(path.read_bytes()))
        pieces = [piece_of(dict(fields_of(value))) for number, value in whole if number == PIECES]
        trainer, normalizer = (
            dict(pair for number, value in whole if number == part for pair in fields_of(value))
            for part in (TRAINER, NORMALIZER)
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a SentencePiece file ({error}): copy or download it again") from None
    if not pieces or len({piece.text for piece in pieces}) < len(pieces):
        raise UserError(f"{path} is not a SentencePiece file (it has no pieces, or one twice): download it again")
    kind = KINDS.get(trainer.get(3, 1), "unknown")
    if kind != "bpe":
        raise UserError(f"{path} is of kind {kind}, and Onward reads bpe: take a tokenizer.json of this model")
    prefix = bool(normalizer.get(3, True))
    if prefix and any(piece.type == USER_DEFINED for piece in pieces):
        raise UserError(
            f"{path} has user-defined symbols and puts a space before texts, which Onward would do behind each symbol: "
            "take a tokenizer.json of this model"
        )
    inner = bpe_of_pieces(pieces, prefix=prefix, squeeze=bool(normalizer.get(4, True)), normalized=True)
    if charsmap := normalizer.get(2):
        inner.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap), inner.normalizer])
    ids = int(trainer.get(41, 1)), int(trainer.get(42, 2))
    first, last = (pieces[i].text if i < len(pieces) and pieces[i].type == CONTROL else None for i in ids)
    return inner, first, last


def piece_of(found: dict[int, Any]) -> Piece:
    return Piece(found[1].decode("utf-8"), float(found.get(2, 0.0)), int(found.get(3, NORMAL)))
