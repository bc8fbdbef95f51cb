"""Tokens that stand for images, video or sound, which Onward does not read: prompts with them are refused. Does not
import torch."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from onward.base.errors import UserError

KEY = re.compile(r"((\w+_)?(image|video|audio|vision)(_\w+)?|[be]o[ia])_token(_id|_index)?")
TABLES = "extra_special_tokens", "thinker_config"  # nested tables whose keys can also match KEY


def media_tokens(tables: Mapping[str, Mapping[str, Any]], inner: tokenizers.Tokenizer) -> dict[int, str]:
    """Tokens for images, video and sound in the files of a model's folder, by id: placeholders, and tokens that begin
    or end their sections."""
    result = {}
    for file in tables.values():
        for table in (file, *(file[name] for name in TABLES if isinstance(file.get(name), Mapping))):
            for value in (value for key, value in table.items() if KEY.fullmatch(key)):
                named = value.get("content") if isinstance(value, Mapping) else value
                token_id = inner.token_to_id(named) if isinstance(named, str) else named
                if type(token_id) is int and 0 <= token_id < 1 << 32:
                    result[token_id] = inner.id_to_token(token_id) or f"<{token_id}>"
    return result


def refuse_media(media: Mapping[int, str], prompt: str | Sequence[int]) -> None:
    """Raise a UserError if a prompt, a text or token ids, has one of the tokens `media`."""
    for token_id, text in media.items():
        if text in prompt if isinstance(prompt, str) else token_id in prompt:
            raise UserError(
                f"Cannot read {text!r} in a prompt, because only the text decoder of this model is loaded: leave out "
                "images, video and sound"
            )
