"""Small vocabularies in the file formats of other libraries: tiktoken's ranks, tekken.json, SentencePiece."""

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from onward import train_tokenizer
from onward.text.patterns import BYTE_OF, TEKKEN
from onward.text.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, Piece

from support.llama_cpp import PARTS


@cache
def small_ranks() -> dict[bytes, int]:
    """A small tiktoken vocabulary (ranks): the bytes, then merges in order."""
    vocab = train_tokenizer("bpe:700", [" ".join(PARTS) * 3]).inner.get_vocab(with_added_tokens=False)
    tokens = sorted((token for token in vocab if not token.startswith("<|")), key=vocab.__getitem__)
    return {bytes(map(BYTE_OF.__getitem__, token)): rank for rank, token in enumerate(tokens)}


def write_ranks(ranks: Mapping[bytes, int], path: Path) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


def write_tekken(ranks: Mapping[bytes, int], folder: Path) -> Path:
    """Write a tekken.json of Mistral's format with 500 of the ranks after 20 control tokens."""
    config = {"pattern": TEKKEN, "default_vocab_size": 520, "default_num_special_tokens": 20, "version": "v3"}
    listed = [
        {"rank": rank, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for t, rank in ranks.items()
    ]
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": listed}))
    return folder


def message(*fields: tuple[int, int | float | bytes]) -> bytes:
    """A protobuf message."""
    found = b""
    for number, value in fields:
        if isinstance(value, float):
            found += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            found += varint(number << 3) + varint(value)
        else:
            found += varint(number << 3 | 2) + varint(len(value)) + value
    return found


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def write_pieces(path: Path, pieces: Sequence[Piece], *, kind: int = 2, prefix: int = 1, squeeze: int = 0) -> Path:
    listed = [(1, message((1, p.text.encode()), (2, float(p.score)), (3, p.type))) for p in pieces]
    fallback = int(any(p.type == BYTE for p in pieces))
    trainer, normalizer = message((3, kind), (35, fallback)), message((3, prefix), (4, squeeze))
    path.write_bytes(message(*listed, (2, trainer), (3, normalizer)))
    return path


CONTROLS = [Piece("<unk>", 0, UNKNOWN), Piece("<s>", 0, CONTROL), Piece("</s>", 0, CONTROL)]
BYTES = [Piece(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)]
WORDS = [Piece(text, -n, NORMAL) for n, text in enumerate(["ab", "\u2581ab", "abc", "\u2581", "a", "b", "c"], 1)]
PIECES = CONTROLS + BYTES + WORDS
