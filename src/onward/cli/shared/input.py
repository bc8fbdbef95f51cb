"""Standard input as text: all of it, or line by line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import AnyStr

from onward.base.errors import UserError

MOST_INPUT = 1 << 24  # maximum number of bytes of a prompt, or of characters of a message; more than fit into a context


def read_text() -> str:
    """Return the text on standard input without its last line break, which `echo` adds."""
    with refused_input():
        text = within_limit(sys.stdin.buffer.read(MOST_INPUT + 1)).decode("utf-8-sig")
    return text.removesuffix("\n").removesuffix("\r")


def read_line() -> str:
    """Return the next line of standard input. Raises EOFError after the last one, as `input` does."""
    with refused_input():
        line = within_limit(sys.stdin.readline(MOST_INPUT + 1))
    if not line:
        raise EOFError
    return line.removesuffix("\n")


@contextmanager
def refused_input() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text (byte {error.start:,}): convert it") from None


def within_limit(text: AnyStr) -> AnyStr:
    """Return `text`. Raises a UserError if it is longer than 2 ** 24 bytes or characters, so that endless input is
    refused."""
    if len(text) > MOST_INPUT:
        raise UserError(f"standard input is longer than {MOST_INPUT >> 20} MiB, too long for a prompt: shorten it")
    return text
