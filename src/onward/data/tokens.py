"""Tokens on disk: what a run trains on and is validated with."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from onward.errors import UserError
from onward.files import read_json, write_json, written_whole
from onward.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenData:
    """Token ids, mapped from disk, and what is known of them."""

    train: np.ndarray
    validation: np.ndarray | None
    info: dict[str, Any]


def write_tokens(
    folder: Path,
    tokenizer: Tokenizer,
    documents: Iterable[str],
    validation: float | Iterable[str] | None,
    sources: Sequence[Mapping[str, str]] = (),
) -> TokenData:
    """Encode documents into train.bin and validation.bin, each document followed by the end token.

    `validation` is a share at the end of the documents' tokens, other documents, or None; `sources` is kept on record.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    train, info = encode(tokenizer, documents, dtype)
    held: np.ndarray | None = None
    if isinstance(validation, float):
        border = int(len(train) * (1 - validation))
        train, held = train[:border], train[border:]
    elif validation is not None:
        held, other = encode(tokenizer, validation, dtype)
        info["unknown_characters"] += other["unknown_characters"]
    if held is not None and len(held) < 2:
        raise UserError("the validation text has fewer than two tokens: give it more, or --validation none")
    parts = {"train": train} | ({} if held is None else {"validation": held})
    for name, tokens in parts.items():
        with written_whole(folder / f"{name}.bin") as new:
            tokens.tofile(new)
        info[name] = {"tokens": len(tokens), "sha256": hashlib.sha256(tokens.tobytes()).hexdigest()}
    write_json(folder / "data.json", info | {"dtype": dtype.name, "sources": list(sources)})
    return load_tokens(folder)


def encode(tokenizer: Tokenizer, documents: Iterable[str], dtype: np.dtype[Any]) -> tuple[np.ndarray, dict[str, Any]]:
    """All documents as one array, and how much there was."""
    info = {"documents": 0, "bytes": 0, "unknown_characters": 0}
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    found = [np.empty(0, dtype)]
    console = Console(stderr=True)
    for text in track(documents, "encoding", console=console, transient=True, disable=not console.is_terminal):
        ids = tokenizer.encode(text, special=False)
        info["documents"] += 1
        info["bytes"] += len(text.encode())
        info["unknown_characters"] += ids.count(tokenizer.unknown_id) if tokenizer.unknown_id is not None else 0
        found.append(np.array(ids + end, dtype=dtype))
    return np.concatenate(found), info


def load_tokens(folder: Path) -> TokenData:
    """What `write_tokens` wrote; a UserError if a file is not what it was."""
    info = read_json(folder / "data.json")
    found: dict[str, np.ndarray | None] = {"validation": None}
    for name in ("train", "validation"):
        if name in info:
            path = folder / f"{name}.bin"
            size = info[name]["tokens"] * np.dtype(info["dtype"]).itemsize
            if not path.exists() or path.stat().st_size != size:
                raise UserError(f"{path} is missing or not the size it was written with: start a new run from the text")
            found[name] = np.memmap(path, dtype=info["dtype"], mode="r")
    return TokenData(found["train"], found["validation"], info)  # type: ignore[arg-type]
