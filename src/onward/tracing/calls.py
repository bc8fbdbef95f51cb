"""Calls of a model: whose rows they have, and where in its text each token is.

Shapes: B batch, T tokens in this call, S keys, N tokens whose logits are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.errors import UserError
from onward.model.mask import AttentionMask


@dataclass(frozen=True)
class Row:
    """What one row of a call of the model belongs to, where an engine calls it."""

    request: Any  # a generation.Request; None in a call of a draft
    tokens: int  # its tokens in the call; those after them are padding
    step: int  # number of tokens that were generated for it before
    start: int  # position of the first of these tokens in prompt + answer


ROWS: ContextVar[tuple[Row, ...]] = ContextVar("rows", default=())


@contextmanager
def labeled(rows: Sequence[Row]) -> Iterator[None]:
    """Say whose rows the calls of a model inside the `with` block have."""
    before = ROWS.set(tuple(rows))
    try:
        yield
    finally:
        ROWS.reset(before)


@dataclass(eq=False)
class Forward:
    """A call of the model."""

    positions: Tensor | None = None  # (B or 1, T), of its tokens in their texts; None before the blocks are called
    running: bool = False  # False while activation checkpointing computes a block again: that is not recorded

    def begin(self, width: int, positions: Tensor | None, device: torch.device) -> None:
        """The model is called with rows of `width` tokens at these positions (B, T), by default 0, 1, 2, ...

        Positions in a text are those of the model, but for requests of an engine whose context slides.
        """
        index = torch.arange(width, device=device)
        if rows := ROWS.get():
            self.positions = torch.tensor([row.start for row in rows], device=device)[:, None] + index
        else:
            self.positions = index[None] if positions is None else positions
        self.running = True


@dataclass(frozen=True, eq=False)
class Location:
    """Where an activation of a call is: its dimensions, and the positions of its tokens and keys."""

    name: str
    shape: tuple[str | int, ...]  # B, T, S and numbers
    forward: Forward
    mask: AttentionMask | None = None  # of an activation with keys

    def token_positions(self, x: Tensor) -> Tensor:
        """The positions (B or 1, T) of the tokens of an activation; a UserError where they are not known, as for
        logits of chosen tokens outside of an engine."""
        found = self.forward.positions
        if self.name == "logits" and (rows := ROWS.get()):
            found = torch.cat([torch.arange(row.start, row.start + row.tokens) for row in rows])[None].to(x.device)
        if found is None or x.ndim != len(self.shape) or found.size(1) != x.size(self.shape.index("T")):
            raise UserError("the positions of its tokens are not known here: edit all, or another activation")
        return found

    def key_positions(self, x: Tensor) -> Tensor:
        """The positions (B or 1, S) of the keys of an activation; negative where a cache is empty."""
        assert self.mask is not None, "an activation with keys comes with its mask"
        offset = self.token_positions(x)[:, :1] - self.mask.query_positions[:, :1]
        return torch.where(self.mask.key_positions < 0, -1, self.mask.key_positions + offset)

    def along(self, letter: str, x: Tensor) -> Tensor:
        """The positions of the tokens (T) or keys (S) of an activation, in a shape that broadcasts to it."""
        positions = self.token_positions(x) if letter == "T" else self.key_positions(x)
        sizes = [1] * x.ndim
        sizes[0], sizes[self.shape.index(letter)] = positions.shape
        return positions.view(sizes)

    def visible(self, x: Tensor) -> Tensor | None:
        """Whether each query attends to each key, in a shape that broadcasts to an activation with keys."""
        if self.mask is None:
            return None
        seen = self.mask.visible()  # (B or 1, T, S)
        return seen if x.ndim == seen.ndim else seen[:, None]
