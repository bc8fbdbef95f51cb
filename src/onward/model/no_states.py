"""The states of a cache without recurrent layers: none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

Snapshot = dict[str, Tensor]  # the states of one row by "layer.name", each of the state's shape


class NoStates:
    """The states of the rows of a cache, as the cache of a model without recurrent layers has them: none. `RowStates`
    are those of other models."""

    layers: Sequence[dict[str, Tensor]] = ()  # states of each layer by name, each (rows, K + 1, ...)

    def __bool__(self) -> bool:
        return False

    def nbytes(self) -> int:
        return 0

    def holds(self, row: int, length: int) -> bool:
        """Whether a row can continue after its first `length` tokens; on an accelerator this waits for the device."""
        return True

    def note(self, positions: Tensor) -> None:
        """Note that the first rows advance at `positions` (B, T) outside the model, as in a compiled step."""

    def preserved(self) -> AbstractContextManager[object]:
        """A context after which the states are as before."""
        return nullcontext()

    def snapshot_bytes(self) -> int:
        return 0

    def forget(self, row: int) -> None:
        """Let a row have no states, as its request has left; the next one begins at position 0 or from a snapshot."""

    def snapshot(self, row: int, length: int) -> Snapshot:
        """Copy the states of a row after its first `length` tokens, at least one. Raises a UserError if they are not
        kept."""
        return {}

    def restore(self, row: int, length: int, snapshot: Snapshot) -> None:
        """Give a row the states of `snapshot`, taken after the first `length` tokens of a row. It has no others then,
        and continues at position `length`."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give the rows `targets` all states of the rows `sources`, which may overlap, for beams and forks."""
