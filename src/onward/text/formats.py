"""Tokenizers in other files than tokenizer.json, as they are published beside weights. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from onward.base.errors import UserError
from onward.text.ranks import is_ranks, load_ranks, load_tekken
from onward.text.sentencepiece import read_sentencepiece

END = "<|endoftext|>"  # follows every document and, as in GPT-2, precedes the first
OTHER_NAMES = "vocab.json", "tekken.json"
OTHER_SUFFIXES = ".model", ".tiktoken"


def read_other(file: Path) -> tuple[tokenizers.Tokenizer, str | None, str | None, str | None]:
    """(tokenizer, beginning-of-text, end-of-text and padding token) of a file with one of these names or suffixes;
    unknown ones are None."""
    if file.name == "vocab.json":
        return byte_level(read_bpe(file.parent), use_regex=True), None, None, None
    if file.name == "tekken.json":
        return load_tekken(file)
    return load_ranks(file) if is_ranks(file) else read_sentencepiece(file)


def read_bpe(folder: Path) -> models.BPE:
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not merges.exists():
        raise UserError(f"there is no merges.txt in {folder}, which {vocab.name} needs: copy or download it")
    try:
        return models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{vocab} and merges.txt are not a tokenizer ({error}): copy or download both again") from None


def add_published(inner: tokenizers.Tokenizer, tables: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    listed = tables.get("tokenizer_config.json", {}).get("added_tokens_decoder")
    for i, token in sorted(listed.items(), key=lambda pair: int(pair[0])) if isinstance(listed, dict) else ():
        options = {name: bool(token.get(name)) for name in ("lstrip", "rstrip", "normalized", "special")}
        added = tokenizers.AddedToken(str(token.get("content")), **options)
        (inner.add_special_tokens if options["special"] else inner.add_tokens)([added])
        if inner.token_to_id(added.content) != int(i):
            raise UserError(
                f"Cannot add the token {added.content!r} of tokenizer_config.json, because {file.name} gives it "
                f"another id than {i}: copy or download both files again"
            )


def byte_level(model: models.Model, *, use_regex: bool) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END])
    return inner
