"""The bound on the characters of a prompt: a text that cannot fit into the context is not tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from onward.generation.prompts import Prompt
from onward.serving.errors import TOO_LONG, ApiError
from onward.serving.models import Served
from onward.text.tokenizer import Tokenizer

ALWAYS = 1 << 16  # number of characters that are always tokenized, which takes some milliseconds
TRUNCATED = 1 << 20  # the same for a prompt of which only the end is kept


def check_size(size: int, served: Served, field: str, truncate: int | None = None) -> None:
    """Raise an ApiError for a text with more characters than a full context of the longest tokens; ALWAYS characters,
    or TRUNCATED with `truncate`, which keeps only the last tokens, are allowed in any case."""
    length = served.engine.length
    most = max(ALWAYS, length * longest_token(served.lm.text()), TRUNCATED if truncate else 0)
    if size > most:
        raise ApiError(
            f"Cannot read {size:,} characters, because this model's maximum context length is {length} tokens, "
            f"which have at most {most:,} characters: shorten {field}",
            param=field,
            code=TOO_LONG,
        )


@lru_cache(maxsize=64)
def longest_token(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.inner.get_vocab()), default=1)


def size_of(prompts: str | Sequence[Any]) -> int:
    """The number of characters of prompts that are texts; 0 for token ids."""
    return len(prompts) if isinstance(prompts, str) else sum(len(one) for one in prompts if isinstance(one, str))


def prompts_in(given: str | Sequence[Any]) -> Sequence[Prompt]:
    """The prompts in a field that holds one text, the token ids of one, or a list of either."""
    return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
