"""The interface of processes that share a task, for a single process. `parallel/` has classes with the same methods for
several processes. Code that uses these classes works with any number of processes, and a single process imports
nothing from `parallel/`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")
Item = TypeVar("Item")


class Alone:
    """The only process of a task: rank 0 of 1, which does all the work."""

    rank: int = 0

    @property
    def count(self) -> int:
        """The number of processes or groups of processes that divide the work."""
        return 1

    @property
    def leads(self) -> bool:
        """Whether this process is the first of its group, whose results are used."""
        return True

    @property
    def divides(self) -> bool:
        """Whether the processes divide the model among them, so that none holds all of it."""
        return False

    @property
    def batch_rank(self) -> int:
        """The index of this process among the processes that have batches of their own."""
        return 0

    @property
    def batch_count(self) -> int:
        """The number of processes that have batches of their own."""
        return 1

    def agreed(self, value: Callable[[], str]) -> str:
        """Return the text that rank 0 computes by calling `value`, in all processes."""
        return value()

    def wait(self) -> None:
        """Wait until all processes have called this method."""

    def first_before_others(self) -> AbstractContextManager[None]:
        """Return a context that rank 0 enters at once, and the other processes only after rank 0 has left it."""
        return nullcontext()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each of the `values` over all processes."""
        return list(values)

    def share(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items that this process computes."""
        return iter(items)

    def together(self, name: str, work: Callable[[], T]) -> list[T]:
        """Call `work` in all processes at the same time, and return their results; `name` names the work in
        messages."""
        return [work()]

    def first(self, name: str, work: Callable[[], T]) -> T:
        """Call `work` in the first process only, and return its result in all processes."""
        return work()

    def map(self, name: str, function: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """Return the results of a function for all items, in order."""
        return [function(item) for item in items]


ALONE = Alone()
