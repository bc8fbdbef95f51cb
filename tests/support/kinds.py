"""Tokenizers of every kind: bytes, characters, words, and pieces with marked spaces, with every way to add a prefix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from onward import Tokenizer, train_tokenizer
from onward.text.pieces import Piece
from onward.text.sentencepiece import read_sentencepiece

from support import SHARED
from support.vocabularies import CONTROLS, write_pieces

TEXT = "The answer is: four cats on a caterpillar. It is a cat, it is four!\n\nThe cats answer é猫 " * 4
PIECES = ["The", "answer", "is", "four", "cat", "cats", "caterpillar", "ca", "ter", "pillar", "an", "er", "the"]
MERGED = [piece for word in PIECES for piece in (word, f"\u2581{word}")]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
CONTROL = ["<s>", "</s>"]


def merges(vocabulary: list[str]) -> list[tuple[str, str]]:
    """Merges that build every piece from its characters, left to right."""
    made = list[tuple[str, str]]()
    for piece in [*vocabulary]:
        for size in range(1, len(piece)):
            if (pair := (piece[:size], piece[size])) not in made:
                made.append(pair)
    return made


def marked(prefix: str) -> tokenizers.Tokenizer:
    """Pieces with marked spaces and byte fallback, as in Llama; `prefix` says where a space is added: everywhere (by a
    normalizer), or always, first or never (by a pre-tokenizer)."""
    pairs = merges(MERGED)
    characters = sorted(set(TEXT.replace(" ", "\u2581")))
    vocabulary = dict.fromkeys(["<unk>", *BYTE_TOKENS, *characters, *map("".join, pairs)])
    ids = {token: i for i, token in enumerate(vocabulary)}
    inner = tokenizers.Tokenizer(models.BPE(ids, pairs, byte_fallback=True, unk_token="<unk>"))
    if prefix == "everywhere":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=prefix == "always")  # type: ignore[arg-type]
    undo: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(undo + ([decoders.Strip(" ", 1, 0)] if prefix != "never" else []))
    inner.add_special_tokens(CONTROL)
    return inner


def unigram(prefix: str) -> tokenizers.Tokenizer:
    """A unigram tokenizer, as in T5 and XLM-R."""
    scored = [(piece, -float(n)) for n, piece in enumerate(MERGED, 4)]
    letters = [(letter, -60.0) for letter in sorted(set(TEXT.replace(" ", "\u2581")))]
    inner = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *scored, *letters], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)  # type: ignore[arg-type]
    inner.decoder = decoders.Metaspace(prepend_scheme=prefix)  # type: ignore[arg-type]
    inner.add_special_tokens(CONTROL)
    return inner


def byte_level(prefix: bool) -> tokenizers.Tokenizer:
    inner = train_tokenizer("bpe:400", [TEXT]).inner
    if prefix:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.add_special_tokens(CONTROL)
    return inner


def words() -> tokenizers.Tokenizer:
    ids = {token: i for i, token in enumerate(["<unk>", *sorted({*TEXT.split(), "ca", "cat", "terpillar"})])}
    inner = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(CONTROL)
    return inner


def characters() -> tokenizers.Tokenizer:
    inner = train_tokenizer("char", [TEXT]).inner
    inner.add_special_tokens(CONTROL)
    return inner


def sentencepiece(folder: Path, prefix: int, squeeze: int) -> tokenizers.Tokenizer:
    """A tokenizer from a SentencePiece file; with `squeeze`, spaces are stripped and collapsed."""
    texts = dict.fromkeys([*map("".join, merges(MERGED)), *sorted(set(TEXT.replace(" ", "\u2581")))])
    pieces = [*CONTROLS, *(Piece(text, -n, 1) for n, text in enumerate(texts))]
    return read_sentencepiece(write_pieces(folder / "m.model", pieces, prefix=prefix, squeeze=squeeze))[0]


KINDS: dict[str, Callable[[Path], tokenizers.Tokenizer]] = {
    "bytes": lambda _: train_tokenizer("byte", []).inner,
    "byte-level": lambda _: byte_level(False),
    "byte-level with a prefix": lambda _: byte_level(True),
    "marked everywhere": lambda _: marked("everywhere"),
    "marked always": lambda _: marked("always"),
    "marked first": lambda _: marked("first"),
    "marked never": lambda _: marked("never"),
    "unigram": lambda _: unigram("always"),
    "unigram first": lambda _: unigram("first"),
    "words": lambda _: words(),
    "characters": lambda _: characters(),
    "SentencePiece": lambda folder: sentencepiece(folder, 1, 0),
    "SentencePiece without a prefix": lambda folder: sentencepiece(folder, 0, 0),
    "SentencePiece that squeezes": lambda folder: sentencepiece(folder, 1, 1),
    "stories260K": lambda _: published("stories260K"),
    "GPT-2": lambda _: published("gpt2-tokenizer"),
}


def published(name: str) -> tokenizers.Tokenizer:
    if not (SHARED / name).exists():
        pytest.skip(f"needs the data in {SHARED}")
    return Tokenizer.load(SHARED / name).inner


def of_kind(name: str, folder: Path) -> Tokenizer:
    """A tokenizer of KINDS with control tokens."""
    inner = KINDS[name](folder)
    inner.add_special_tokens([token for token in CONTROL if inner.token_to_id(token) is None])
    return Tokenizer(inner, *CONTROL)
