"""SentencePiece's model files (sentencepiece_model.proto), read without the library. Does not import torch."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from onward.errors import UserError
from onward.text.pieces import CONTROL, NORMAL, UNUSED, USER_DEFINED, Piece, bpe_of_pieces

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
    prefix, squeeze, charsmap = bool(normalizer.get(3, True)), bool(normalizer.get(4, True)), normalizer.get(2)
    symbols = [piece.text for piece in pieces if piece.type == USER_DEFINED]
    if split := bool(symbols) and bool(prefix or squeeze or charsmap):
        pieces = [replace(piece, type=UNUSED) if piece.type == USER_DEFINED else piece for piece in pieces]
    inner = bpe_of_pieces(pieces, prefix=prefix, squeeze=squeeze, normalized=True)
    if charsmap:
        precompiled = normalizers.Precompiled(charsmap)
        if changed := [symbol for symbol in symbols if precompiled.normalize_str(symbol) != symbol]:
            raise UserError(f"{path} normalizes its own symbol {changed[0]!r}: take a tokenizer.json of this model")
        inner.normalizer = normalizers.Sequence([precompiled, inner.normalizer])
    if split and not split_at(inner, symbols):
        raise UserError(f"{path} has symbols that Onward would not find in all texts: take a tokenizer.json")
    ids = int(trainer.get(41, 1)), int(trainer.get(42, 2))
    first, last = (pieces[i].text if i < len(pieces) and pieces[i].type == CONTROL else None for i in ids)
    return inner, first, last


def piece_of(found: dict[int, Any]) -> Piece:
    return Piece(found[1].decode("utf-8"), float(found.get(2, 0.0)), int(found.get(3, NORMAL)))


def split_at(inner: tokenizers.Tokenizer, symbols: Sequence[str]) -> bool:
    """Have a tokenizer find symbols in the normalized text, as SentencePiece does: added tokens would be found before a
    space is put in front of the text, or get that space too. False if this is not possible.

    Texts are split at the symbols, and the model takes each part that is a token as this token. A part that is a token
    without being formed by merges, such as a control token that is written in the text, is split again, so that it
    stays text.
    """
    model = inner.model
    parts = {text: model.tokenize(text) for text in inner.get_vocab().keys() - {*symbols}}
    unformed = {text for text, found in parts.items() if [token.value for token in found] != [text]}
    firsts = []
    for text in unformed:
        ends = {token.offsets[1] for token in parts[text]}  # in bytes
        cuts = (cut for cut in range(1, len(text)) if len(text[:cut].encode()) in ends)
        cut = next((cut for cut in cuts if unformed.isdisjoint((text[:cut], text[cut:]))), None)
        if cut is None:
            return False
        firsts.append(rf"{re.escape(text[:cut])}(?={re.escape(text[cut:])}\z)")
    longest = sorted(symbols, key=len, reverse=True)
    patterns = "|".join(map(re.escape, longest)), rf"\A(?:{'|'.join(sorted(firsts))})"
    split = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    inner.pre_tokenizer = pre_tokenizers.Sequence(split)
    model.ignore_merges = True
    return True
