"""Warnings about prompts and options that are allowed but rarely intended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from onward.cli.shared.output import console

if TYPE_CHECKING:
    from onward.text.tokenizer import Tokenizer

HOT = 2.0  # temperature above which a warning is printed


def warn_of_unknown(tokenizer: Tokenizer | None, texts: Iterable[str]) -> None:
    """Print a warning with the number of characters in `texts` that the tokenizer does not know, if there are any."""
    if tokenizer is not None and tokenizer.unknown_id is not None:
        count = sum(tokenizer.encode(text).count(tokenizer.unknown_id) for text in texts)
        if count:
            console.print(f"{count:,} characters are unknown to the tokenizer and are read as \ufffd")


def warn_of_temperature(temperature: float) -> None:
    """Print a warning if the sampling temperature is above 2, at which tokens are drawn almost at random."""
    if temperature > HOT:
        console.print(
            f"the temperature is {temperature:g}: above {HOT:g}, tokens are drawn almost at random; usual is about 1",
            soft_wrap=True,
        )
