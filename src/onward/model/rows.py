"""The request of each row in the current call of a model, for the traces and edits that are open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """The request to which one row of an engine's batch belongs in one call of the model, with the number and the
    positions of the request's tokens in this call."""

    request: Any  # a generation.Request; None in a call of the draft model
    tokens: int  # number of the request's tokens in the call; later columns are padding
    step: int  # number of tokens generated for the request before this call
    start: int  # position in prompt + answer of the call's first token


OPEN: ContextVar[tuple[Any, ...]] = ContextVar("open", default=())  # the traces and edits that this context opened
ROWS: ContextVar[tuple[Row, ...]] = ContextVar("rows", default=())


def labeled(rows: Iterable[Row]) -> AbstractContextManager[None]:
    """Return a context manager that labels the rows of a model's calls with their requests, `rows`, so that a trace can
    return the activations of one request. `rows` is read only if a trace or an edit is open."""
    return labels(tuple(rows)) if OPEN.get() else nullcontext()


@contextmanager
def labels(rows: tuple[Row, ...]) -> Iterator[None]:
    before = ROWS.set(rows)
    try:
        yield
    finally:
        ROWS.reset(before)
