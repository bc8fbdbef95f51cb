"""Tokenizers of SentencePiece's kind, made from pieces with scores (Kudo and Richardson 2018). Does not import
torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

SPACE = "\u2581"  # stands for a space in pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Piece:
    """A token of a SentencePiece vocabulary; its id is its index."""

    text: str
    score: float
    type: int  # NORMAL ... BYTE


def formations(text: str, pieces: Set[str]) -> Iterator[tuple[str, str]]:
    """Cuts of `text` into two halves that are single characters or `pieces`."""
    for cut in range(1, len(text)):
        halves = text[:cut], text[cut:]
        if all(len(half) == 1 or half in pieces for half in halves):
            yield halves


def merges_of(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """All pairs of pieces whose joined text is a normal piece, ordered by its score, highest first, then by the pair's
    ids."""
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:
        if piece.type == NORMAL:
            for cut in range(1, len(piece.text)):
                left, right = ids.get(piece.text[:cut]), ids.get(piece.text[cut:])
                if left is not None and right is not None:
                    merges.append((-piece.score, left, right))
    return [(pieces[left].text, pieces[right].text) for _, left, right in sorted(merges)]


def bpe_of_pieces(
    pieces: Sequence[Piece],
    *,
    prefix: bool,
    suffix: bool = False,
    squeeze: bool = False,
    normalized: bool = False,
) -> tokenizers.Tokenizer:
    """A BPE tokenizer that merges pieces by their scores; unknown characters become byte pieces, if there are any.

    `prefix` adds a space before a text or, together with `suffix`, after it; `squeeze` strips spaces and collapses runs
    of them; with `normalized`, user-defined tokens are matched after normalization (see `add_tokens`)."""
    unknown = next((piece.text for piece in pieces if piece.type == UNKNOWN), None)
    vocab = {piece.text: i for i, piece in enumerate(pieces)}
    fallback = any(piece.type == BYTE for piece in pieces)
    inner = tokenizers.Tokenizer(
        models.BPE(vocab, merges_of(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=fallback)
    )
    steps: list[normalizers.Normalizer] = []
    if squeeze:
        steps += [normalizers.Replace(Regex(pattern), to) for pattern, to in ((r"\A +", ""), (" {2,}", " "))]
    end = rf"[ {SPACE}]*\z" if squeeze else r"\z"
    if squeeze or (prefix and suffix):
        steps.append(normalizers.Replace(Regex(end), SPACE if prefix and suffix else ""))
    if prefix and not suffix:
        steps.append(normalizers.Prepend(SPACE))
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undo = [decoders.Replace(SPACE, " "), *([decoders.ByteFallback()] if fallback else []), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix or squeeze else undo)
    add_tokens(inner, [(piece.text, piece.type) for piece in pieces], normalized=normalized)
    return inner


def add_tokens(inner: tokenizers.Tokenizer, typed: Sequence[tuple[str, int]], *, normalized: bool = False) -> None:
    """Register unknown, control and user-defined tokens, `typed` as (text, SentencePiece type). User-defined tokens are
    matched in the text as given or, if `normalized`, after normalization; tokens with a space are then left out."""
    texts = [text for text, kind in typed if kind == USER_DEFINED and not (normalized and " " in text)]
    own = [AddedToken(text, normalized=normalized, special=False) for text in texts]
    control = [AddedToken(text, normalized=False, special=True) for text, kind in typed if kind in (UNKNOWN, CONTROL)]
    inner.add_tokens(own)
    inner.add_special_tokens(control)
