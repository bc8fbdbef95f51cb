"""Processes that each hold the whole model and divide independent work, such as the batches of an evaluation."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from torch import distributed

from onward.errors import UserError

T = TypeVar("T")
Item = TypeVar("Item")


class SharedError(UserError):
    """A UserError of one process that all processes raise, so that they go on alike."""


@dataclass(frozen=True)
class Replicas:
    """The processes that divide work, with the rank of this one; by default one process, which does all of it.

    All processes make the same calls in the same order. An error of the user in one process is raised by all, and calls
    that differ, for example because files do, are an error too.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def of_group(cls) -> "Replicas":
        """Return the processes of torch's process group; one process without a group."""
        if not distributed.is_initialized():
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    def share(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items that this process computes: item i belongs to the rank i modulo the number of processes."""
        return islice(items, self.rank, None, self.count)

    def together(self, name: str, work: Callable[[], T]) -> list[T]:
        """Call `work` in all processes at the same time, and return the results of all, by rank. `name` is the name of
        the work, equal in all processes, for the check and for messages. Raises a SharedError if a process raises a
        UserError or does other work."""
        if self.count == 1:
            return [work()]
        outcome: T | UserError
        try:
            outcome = work()
        except SharedError:  # which the other processes have raised, too
            raise
        except UserError as error:
            outcome = error
        outcomes: list[Any] = [None] * self.count
        distributed.all_gather_object(outcomes, (name, outcome))
        if failed := [one for _, one in outcomes if isinstance(one, UserError)]:
            raise SharedError(str(failed[0]))
        if other := next((rank for rank, (its, _) in enumerate(outcomes) if its != outcomes[0][0]), 0):
            raise SharedError(
                f"rank {other} computes {outcomes[other][0]}, and rank 0 {outcomes[0][0]}: give all ranks the same "
                "model, files and versions"
            )
        return [one for _, one in outcomes]

    def first(self, name: str, work: Callable[[], T]) -> T:
        """Call `work` in the first process alone, and return its result in all; see `together`."""
        result: Any = self.together(name, lambda: None if self.rank else work())[0]
        return result  # type: ignore[no-any-return]

    def map(self, name: str, function: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """Return the results of a function for all items, in order; each process computes its share."""
        parts = self.together(name, lambda: [function(item) for item in self.share(items)])
        return [parts[i % self.count][i // self.count] for i in range(sum(map(len, parts)))]


ALONE = Replicas()  # one process, which does all work
