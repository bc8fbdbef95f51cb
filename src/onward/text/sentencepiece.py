"""SentencePiece's model files (sentencepiece_model.proto), read without the library. Does not import torch.

A file is read only if the library's tokens can be reproduced for every text: each field is either used or concerns only
training. A file with any other field is refused, and the message names the field.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, pre_tokenizers

from onward.base.errors import UserError
from onward.text.pieces import (
    BYTE,
    BYTE_PIECE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    bpe_of_pieces,
    formations,
)

KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
Fields = Mapping[int, tuple[str, int]]  # number -> name, wire type
MODEL: Fields = {
    1: ("pieces", BYTES),
    2: ("trainer_spec", BYTES),
    3: ("normalizer_spec", BYTES),
    4: ("self_test_data", BYTES),
    5: ("denormalizer_spec", BYTES),
}
PIECE: Fields = {1: ("piece", BYTES), 2: ("score", FIXED32), 3: ("type", VARINT)}
TRAINER: Fields = {
    3: ("model_type", VARINT),
    24: ("treat_whitespace_as_suffix", VARINT),
    35: ("byte_fallback", VARINT),
    46: ("bos_piece", BYTES),
    47: ("eos_piece", BYTES),
    48: ("pad_piece", BYTES),
}
NORMALIZER: Fields = {
    1: ("name", BYTES),
    2: ("precompiled_charsmap", BYTES),
    3: ("add_dummy_prefix", VARINT),
    4: ("remove_extra_whitespaces", VARINT),
    5: ("escape_whitespaces", VARINT),
}
SAMPLES: Fields = {1: ("samples", BYTES)}
SAMPLE: Fields = {1: ("input", BYTES), 2: ("expected", BYTES)}
UNREAD: dict[str, Set[int]] = {  # settings of the training, and names that repeat information in the pieces
    "trainer_spec": {*range(1, 56)} - {8, 9, 27, 28, 29, 37, 38, 39, *TRAINER},
    "normalizer_spec": {6},  # the file that the character map was made from
}


def fields_of(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Decode a protobuf message to (field number, wire type, value); ValueError if it is damaged."""
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
            yield number, kind, varint()
            continue
        size = varint() if kind == BYTES else {FIXED64: 8, FIXED32: 4}.get(kind, -1)
        if size < 0 or at + size > len(data):
            raise ValueError("it is cut off")
        value = data[at : at + size]
        at += size
        yield number, kind, struct.unpack("<f", value)[0] if kind == FIXED32 else value


class UnknownField(Exception):
    """A field that Onward does not know and that may change tokens."""


def message(parts: Sequence[bytes], known: Fields, where: str) -> dict[str, list[Any]]:
    """Decode a protobuf message: {field: its values, since a field may be repeated}. `known` maps numbers to (name,
    wire type)."""
    entries: dict[str, list[Any]] = {}
    for number, kind, value in (field for part in parts for field in fields_of(part)):
        name, wanted = known.get(number, ("", kind))
        if not name and number not in UNREAD.get(where, ()):
            raise UnknownField(f"field {number} in {where}")
        if kind != wanted:
            raise ValueError(f"{name} is not {'text' if wanted == BYTES else 'a number'}")
        if name:
            entries.setdefault(name, []).append(value)
    return entries


def read_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, str | None, str | None, str | None]:
    """(tokenizer, beginning-of-text, end-of-text and padding token) of a SentencePiece file; unknown ones are None.

    Raises a UserError if Onward's tokenizer would give different tokens from the SentencePiece library."""
    try:
        model = message([path.read_bytes()], MODEL, "the model")
        pieces = [piece_of(message([part], PIECE, "a piece")) for part in model.get("pieces", ())]
        trainer = message(model.get("trainer_spec", ()), TRAINER, "trainer_spec")
        normalizer, denormalizer = (
            message(model.get(name, ()), NORMALIZER, "normalizer_spec")
            for name in ("normalizer_spec", "denormalizer_spec")
        )
        tests = message(model.get("self_test_data", ()), SAMPLES, "self_test_data")
        samples = [message([part], SAMPLE, "a sample") for part in tests.get("samples", ())]
        named = [last(trainer, f"{name}_piece", b"").decode() or text for name, text in NAMED.items()]
        texts = [tuple(last(one, name, b"").decode() for name in ("input", "expected")) for one in samples]
    except UnknownField as error:
        raise UserError(
            f"{path} has {error}, which Onward does not know: use the model's tokenizer.json instead"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not a SentencePiece file ({error}): copy or download it again") from None
    if not pieces or len({piece.text for piece in pieces}) < len(pieces):
        raise UserError(f"{path} is not a SentencePiece file (it has no pieces, or one twice): download it again")
    around = bool(last(normalizer, "add_dummy_prefix", 1))
    suffix = bool(last(trainer, "treat_whitespace_as_suffix", 0))
    squeeze = bool(last(normalizer, "remove_extra_whitespaces", 1))
    fallback = bool(last(trainer, "byte_fallback", 0))
    if why := of_specs(trainer, normalizer, denormalizer) or of_pieces(pieces, fallback, squeeze):
        raise UserError(f"{path} {why}: use the model's tokenizer.json instead")
    symbols = [piece.text for piece in pieces if piece.type == USER_DEFINED]
    if split := bool(symbols) and (around or squeeze):
        pieces = [replace(piece, type=UNUSED) if piece.type == USER_DEFINED else piece for piece in pieces]
    inner = bpe_of_pieces(pieces, prefix=around, suffix=suffix, squeeze=squeeze, normalized=True)
    if split and not split_at(inner, symbols):
        raise UserError(f"{path} has symbols that Onward would not find in all texts: use a tokenizer.json instead")
    check_samples(path, inner, texts)
    control = {piece.text for piece in pieces if piece.type == CONTROL}
    first, end, pad = (text if text in control else None for text in named)
    return inner, first, end, pad


NAMED = {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}


def last(values: Mapping[str, Sequence[Any]], name: str, default: Any) -> Any:
    """The last value of a field, which counts by protobuf's rules."""
    return values[name][-1] if name in values else default


def piece_of(values: Mapping[str, Sequence[Any]]) -> Piece:
    piece = Piece(last(values, "piece", b"").decode(), last(values, "score", 0.0), last(values, "type", NORMAL))
    if not piece.text or not NORMAL <= piece.type <= BYTE or not math.isfinite(piece.score):
        raise ValueError(f"the piece {piece.text!r:.40} has type {piece.type} and score {piece.score}")
    return piece


def of_specs(trainer: Mapping[str, Any], normalizer: Mapping[str, Any], denormalizer: Mapping[str, Any]) -> str:
    """A setting that Onward's tokenizer does not support, in words that follow the file's name; "" if there is none."""
    kind = KINDS.get(last(trainer, "model_type", 1), "unknown")
    if kind != "bpe":
        return f"is of kind {kind}, and Onward reads only bpe"
    if last(normalizer, "precompiled_charsmap", b""):
        rules = last(normalizer, "name", b"").decode("utf-8", "replace") or "its own"
        return (
            f"normalizes texts by a character map (precompiled_charsmap, {rules!r:.40}), which `tokenizers` "
            "cannot apply longest rule first"
        )
    if not last(normalizer, "escape_whitespaces", 1):
        return "keeps spaces as they are (escape_whitespaces is false), which Onward does not support"
    if last(denormalizer, "precompiled_charsmap", b""):
        return "changes decoded texts (denormalizer_spec), which Onward does not support"
    return ""


def of_pieces(pieces: Sequence[Piece], fallback: bool, squeeze: bool) -> str:
    """A property of the vocabulary with which Onward's tokenizer would give different tokens from the library, in words
    that follow the file's name; "" if there is none."""
    of_type = {kind: [piece.text for piece in pieces if piece.type == kind] for kind in range(NORMAL, BYTE + 1)}
    if len(of_type[UNKNOWN]) != 1:
        return f"has {len(of_type[UNKNOWN])} pieces of type UNKNOWN instead of exactly one"
    wanted = {f"<0x{byte:02X}>" for byte in range(256)} if fallback else set()
    if wanted != {*of_type[BYTE]}:
        return f"has {len(of_type[BYTE])} pieces for bytes, although byte_fallback is {str(fallback).lower()}"
    if short := next((text for text in of_type[CONTROL] + of_type[UNKNOWN] if len(text) == 1), ""):
        return f"has the control token {short!r}, a single character that texts may contain"
    if squeeze and (spaced := next((text for text in of_type[USER_DEFINED] if "  " in text), "")):
        return f"has the symbol {spaced!r}, whose spaces SentencePiece keeps despite remove_extra_whitespaces"
    if not fallback and (byte := next(filter(BYTE_PIECE.fullmatch, of_type[USER_DEFINED] + of_type[NORMAL]), "")):
        return f"has {byte!r} as text, although byte_fallback is false"
    ordinary, symbols = {*of_type[NORMAL], *of_type[UNUSED]}, {*of_type[USER_DEFINED]}
    scores = Counter[float]()
    for piece in pieces:
        pairs = formations(piece.text, ordinary) if piece.text in ordinary else ()
        halves = {half for pair in pairs if symbols.isdisjoint(pair) for half in pair}
        if piece.type == UNUSED and (halves or len(piece.text) == 1):
            return f"has the unused piece {piece.text!r}, which merges can form"
        if alone := halves - ordinary:
            return f"has the piece {piece.text!r} and no piece {min(alone)!r}"
        scores.update([piece.score] if halves else [])
    if same := next((score for score, count in scores.items() if count > 1), None):
        return f"has several pieces of the score {same:g}, which are merged from left to right"
    return ""


def check_samples(path: Path, inner: tokenizers.Tokenizer, samples: Sequence[tuple[str, ...]]) -> None:
    """Compare the tokenizer's pieces with the file's self-test samples, (text, expected pieces joined by spaces),
    except samples with unknown tokens."""
    unknown = getattr(inner.model, "unk_token", None)
    inner.encode_special_tokens = True
    for text, expected in samples:
        pieces = inner.encode(text, add_special_tokens=False).tokens
        if unknown not in pieces and pieces != expected.split(" "):
            raise UserError(f"{path} has other pieces for {text!r:.60} in self_test_data: use a tokenizer.json instead")


def split_at(inner: tokenizers.Tokenizer, symbols: Sequence[str]) -> bool:
    """Make the tokenizer match user-defined tokens in the normalized text, as SentencePiece does; return False, without
    a change, if this is not possible. As added tokens of `tokenizers`, they would be matched before a space is put in
    front of the text, or would also get that space.

    Texts are split at the symbols, and the model takes each part that is a token as this token. A part that is a token
    without being formed by merges, such as a control token that is written in the text, is split again, so that it
    stays text."""
    model = inner.model
    parts = {text: model.tokenize(text) for text in inner.get_vocab().keys() - {*symbols}}
    unformed = {text for text, pieces in parts.items() if [token.value for token in pieces] != [text]}
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
