"""Regular expressions of users, whose matching takes a bounded time. Does not import torch."""

import re
from functools import lru_cache
from math import prod
from typing import Any

from onward.base.errors import UserError

SECONDS = 1.0  # time limit of matching a text, since backtracking can take exponential time
MOST = 1_000_000  # maximum number of copies of a repeated part, since the library expands {n} into n copies
REPEATS = re.compile(r"(\)?)\{(\d*)(?:,(\d*))?\}")


@lru_cache
def compiled(pattern: str, where: str) -> Any:
    """Compile a regular expression in Python's notation, whose dots match line breaks; `where` names the option in
    errors."""
    import regex  # `re` has no time limit, and cannot be interrupted in a thread

    counts = [(group, int(most or least or 0)) for group, least, most in REPEATS.findall(pattern)]
    copies = max([1, *(count for _, count in counts)]) * prod(max(1, count) for group, count in counts if group)
    if copies > MOST:
        raise UserError(f"{where} is {pattern!r:.99}, which repeats a part more than {MOST:,} times: write + or *")
    try:
        return regex.compile(pattern, regex.DOTALL)
    except (regex.error, OverflowError, RecursionError) as error:
        raise UserError(f"{where} is {pattern!r:.99}, which is not a regular expression: {error}") from None


def matches(pattern: str, text: str, where: str = "the pattern", *, full: bool = True) -> bool:
    """Whether the whole text or, without `full`, a part of it matches; False if matching takes longer than a second."""
    expression = compiled(pattern, where)
    try:
        return (expression.fullmatch if full else expression.search)(text, timeout=SECONDS) is not None
    except TimeoutError:
        return False
