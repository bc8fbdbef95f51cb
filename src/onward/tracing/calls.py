"""The current call of a traced model, and the positions of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.model.mask import AttentionMask
from onward.model.rows import ROWS


@dataclass(eq=False)
class Forward:
    """The record of one call of a traced model, with the position of each token in its own text (prompt and answer)."""

    positions: Tensor | None = None  # (B or 1, T), positions of the tokens in their texts; None before the blocks run
    running: bool = False  # False while activation checkpointing computes a block again, which is not recorded

    def begin(self, width: int, positions: Tensor | None, device: torch.device) -> None:
        """Record that the call of the model begins, with rows of `width` tokens at `positions` (B, T), by default 0, 1,
        2, ... In a call by an engine, the positions come from the labels of its rows instead.

        Positions count tokens of the text; they differ from the model's positions for requests with a sliding context.
        """
        index = torch.arange(width, device=device)
        if rows := ROWS.get():
            self.positions = torch.tensor([row.start for row in rows], device=device)[:, None] + index
        else:
            self.positions = index[None] if positions is None else positions
        self.running = True


@dataclass(frozen=True, eq=False)
class Location:
    """A traced activation in one call of a model: its name, its dimensions, and the positions of its tokens and
    keys."""

    name: str
    shape: tuple[str | int, ...]  # dimensions: B, T, S and numbers
    forward: Forward
    mask: AttentionMask | None = None  # mask of an activation with keys

    def token_positions(self, x: Tensor) -> Tensor:
        """Positions (B or 1, T) in the text of the tokens of `x`; a UserError if they are unknown."""
        positions = self.forward.positions
        if self.name == "logits" and (rows := ROWS.get()):
            positions = torch.cat([torch.arange(row.start, row.start + row.tokens) for row in rows])[None].to(x.device)
        if positions is None or x.ndim != len(self.shape) or positions.size(1) != x.size(self.shape.index("T")):
            raise UserError(
                f"Cannot select positions of {self.name}, because the positions of its tokens are unknown in this "
                "call: edit all positions, or edit another activation"
            )
        return positions

    def key_positions(self, x: Tensor) -> Tensor:
        """Positions (B or 1, S) in the text of the keys of `x`; negative for empty cache slots."""
        assert self.mask is not None, "an activation with keys comes with its mask"
        offset = self.token_positions(x)[:, :1] - self.mask.query_positions[:, :1]
        return torch.where(self.mask.key_positions < 0, -1, self.mask.key_positions + offset)

    def along(self, letter: str, x: Tensor) -> Tensor:
        """Positions along the dimension "T" (tokens) or "S" (keys), in a shape that broadcasts to `x`."""
        positions = self.token_positions(x) if letter == "T" else self.key_positions(x)
        sizes = [1] * x.ndim
        sizes[0], sizes[self.shape.index(letter)] = positions.shape
        return positions.view(sizes)

    def visible(self, x: Tensor) -> Tensor | None:
        """True where a query may attend to a key, in a shape that broadcasts to `x`; None without keys."""
        if self.mask is None:
            return None
        seen = self.mask.visible()  # (B or 1, T, S)
        return seen if x.ndim == seen.ndim else seen[:, None]
