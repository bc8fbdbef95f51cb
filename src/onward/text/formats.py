"""Tokenizers in files other than tokenizer.json, as they are published with weights. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from onward.text.merges import END, read_merges
from onward.text.ranks import is_ranks, load_ranks, load_tekken
from onward.text.sentencepiece import read_sentencepiece

OTHER_NAMES = "vocab.json", "tekken.json"
OTHER_SUFFIXES = ".model", ".tiktoken"


def read_other(file: Path, tables: Mapping[str, Mapping[str, Any]]) -> tuple[tokenizers.Tokenizer, Mapping[str, str]]:
    """(tokenizer, its control tokens by name, such as bos_token) of a file with one of OTHER_NAMES or OTHER_SUFFIXES,
    in a folder with the other files `tables`."""
    if file.name == "vocab.json":
        return read_merges(file.parent, tables)
    read = load_tekken if file.name == "tekken.json" else load_ranks if is_ranks(file) else read_sentencepiece
    inner, *texts = read(file)
    return inner, {name: text for name, text in zip(("bos_token", "eos_token", "pad_token"), texts) if text is not None}


def add_ends(inner: tokenizers.Tokenizer, config: Mapping[str, Any], bos: str | None, eos: str | None) -> None:
    """Let the tokenizer put the beginning-of-text token before a text and the end-of-text token after it, as
    tokenizer_config.json specifies for files without such a rule."""
    first = bos if config.get("add_bos_token") else None
    last = eos if config.get("add_eos_token") else None
    if used := [token for token in (first, last) if token is not None]:
        parts = [part for part in (first, "$A", last) if part is not None]
        inner.post_processor = processors.TemplateProcessing(
            parts, None, [(token, inner.token_to_id(token)) for token in used]
        )


def byte_level(model: models.Model, *, use_regex: bool) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END])
    return inner
