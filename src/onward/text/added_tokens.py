"""Tokens that a vocabulary's companion files add to it: tokenizer_config.json, special_tokens_map.json,
added_tokens.json. Does not import torch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from onward.base.errors import UserError

FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special"
NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
Tables = Mapping[str, Mapping[str, Any]]


def add_published(inner: tokenizers.Tokenizer, tables: Tables, names: Mapping[str, str], file: str) -> None:
    """Add to a vocabulary the tokens that the files `tables` of its folder list or name, in the order of transformers:
    first the listed ones by id, then the other control tokens. `names` are the control tokens of the vocabulary's class
    by name, `file` is the name of the vocabulary's file, which decides the ids of the tokens it has.

    Raises a UserError for a token that cannot get its listed id."""
    known = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    control, unnamed = named(tables, names)
    entries = listed(tables, {token.content for token in (*control, *unnamed) if token.special})
    new = {token.content: i for i, token in entries if inner.token_to_id(token.content) is None}
    tokens = {token.content: token for _, token in entries}
    unknown = getattr(inner.model, "unk_token", None)
    for token in (*control, *unnamed):
        if token.content not in known and (token.content != unknown or inner.token_to_id(unknown) is None):
            tokens.setdefault(token.content, token)
    for token in control:
        if token.content in tokens:
            tokens[token.content].special = True
    inner.add_tokens([token for content, token in tokens.items() if repr(token) != repr(known.get(content))])
    for content, i in new.items():
        if inner.token_to_id(content) != i:
            raise UserError(
                f"Cannot add the token {content!r} of tokenizer_config.json or added_tokens.json with its id {i}, "
                f"which is not the next free id after the tokens of {file}: copy or download the files again"
            )


def listed(tables: Tables, control: Container[str]) -> list[tuple[int, AddedToken]]:
    """(id, token) of tokenizer_config.json's added_tokens_decoder or, in older folders, of added_tokens.json, in the
    order of ids; `control` are the texts of control tokens."""
    table = tables.get("tokenizer_config.json", {}).get("added_tokens_decoder")
    if isinstance(table, dict):
        entries = [(int(i), token_of(entry)) for i, entry in table.items() if is_token(entry) and i.isdecimal()]
    else:
        old = ((text, i, text in control) for text, i in tables.get("added_tokens.json", {}).items() if type(i) is int)
        entries = [(i, AddedToken(text, normalized=not special, special=special)) for text, i, special in old]
    return sorted(entries, key=lambda entry: entry[0])


def named(tables: Tables, names: Mapping[str, str]) -> tuple[list[AddedToken], list[AddedToken]]:
    """The control tokens of a folder that have a name such as bos_token, and those without a name."""
    given = dict(tables.get("tokenizer_config.json", {}))
    if "added_tokens_decoder" not in given:
        older = tables.get("special_tokens_map.json", {})
        given |= {key: value | {"special": True} if is_token(value) else value for key, value in older.items()}
    extra = given.get("extra_special_tokens") or given.get("additional_special_tokens") or []
    given |= extra if isinstance(extra, dict) else {}
    values = {**dict.fromkeys(NAMES), **names, **{key: value for key, value in given.items() if key.endswith("_token")}}
    return list(tokens_in(values.values())), list(tokens_in(extra if isinstance(extra, list) else []))


def tokens_in(values: Iterable[Any]) -> Iterator[AddedToken]:
    for value in values:
        if value and isinstance(value, str):
            yield AddedToken(value, special=True)
        elif is_token(value):
            yield token_of(value)


def is_token(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("content"), str) and bool(entry["content"])


def token_of(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(entry["content"], **{name: bool(entry[name]) for name in FLAGS if name in entry})
