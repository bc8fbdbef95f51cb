"""The states of a cache without recurrent layers: none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

Snapshot = dict[str, Tensor]  # the states of one row by "layer.name", each of the state's shape


class NoStates:
    """The states in a cache of a model without recurrent layers: none. Caches of other models have `RowStates`."""

    layers: Sequence[dict[str, Tensor]] = ()  # states of each layer by name, each (rows, keep + 1, ...)

    def __bool__(self) -> bool:
        return False

    def nbytes(self) -> int:
        return 0

    def holds(self, row: int, length: int) -> bool:
        """Whether a row can continue after its first `length` tokens; on an accelerator this waits for the device."""
        return True

    def note(self, positions: Tensor, first: int = 0) -> None:
        """Record that the rows from row `first` on advance at `positions` (B, T) outside the model, as in a compiled
        step."""

    def preserved(self) -> AbstractContextManager[object]:
        """A context manager that restores the states on exit."""
        return nullcontext()

    def snapshot_bytes(self) -> int:
        return 0

    def forget(self, row: int) -> None:
        """Drop the states of a row whose request has left; the row's next request begins at position 0 or from a
        snapshot."""

    def snapshot(self, row: int, length: int) -> Snapshot:
        """Copy the states of a row after its first `length` tokens, at least one. Raises a UserError if they are not
        kept."""
        return {}

    def restore(self, row: int, length: int, snapshot: Snapshot) -> None:
        """Give a row the states of `snapshot`, taken after the first `length` tokens of a row. The row then has no
        other states, and continues at position `length`."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give the rows `targets` all states of the rows `sources`, which may overlap, for beams and forks."""
