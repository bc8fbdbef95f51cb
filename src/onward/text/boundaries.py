"""Encoding of texts that continue other texts: without the special treatment of a text's beginning. Does not import
torch."""

import json
from typing import Any

import tokenizers


def continuing(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy of the tokenizer that neither adds nor removes spaces at the beginning of a text, and reads special tokens
    as text."""
    table = json.loads(inner.to_str())
    parts = {name: without_beginning(table[name]) for name in ("normalizer", "pre_tokenizer")}
    copy = tokenizers.Tokenizer.from_str(json.dumps(table | parts))
    copy.encode_special_tokens = True
    return copy


def without_beginning(part: Any) -> Any:
    """A normalizer or pre-tokenizer of tokenizer.json without its treatment of a text's beginning; None if nothing is
    left."""
    if part is None:
        return None
    for name in "normalizers", "pretokenizers":  # entries of a sequence
        if name in part:
            inner = [one for one in map(without_beginning, part[name]) if one is not None]
            return {**part, name: inner} if inner else None
    anchored = str(part.get("pattern", {}).get("Regex", "")) if part["type"] == "Replace" else ""
    if part["type"] == "Prepend" or anchored.startswith((r"\A", "^")):
        return None
    same = {"prepend_scheme": "never", "add_prefix_space": False, "strip_left": False}
    return part | {name: value for name, value in same.items() if name in part}
