"""Processes that hold replicas of a model and divide independent work, such as the batches of an evaluation. A replica
is one process or, if a tensor axis divides the model, several processes with consecutive ranks."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from torch import distributed
from torch.distributed import DeviceMesh

from onward.base.alone import Alone
from onward.base.errors import UserError
from onward.config.mesh import Mesh

T = TypeVar("T")
Item = TypeVar("Item")


class SharedError(UserError):
    """A UserError of one process that all processes raise, so that they stay in step."""


@dataclass(frozen=True)
class Replicas(Alone):
    """The processes that divide independent work. The default is a single process, which does all work.

    `mesh` has `replicate` replicas of the model. Each replica is divided over `tensor` processes, which do the same
    work together. All processes must make the same calls in the same order. If one process raises a UserError, all
    processes raise it. They also raise an error if their calls differ, for example because their files differ.
    """

    rank: int = 0  # rank of this process
    mesh: Mesh = Mesh()
    devices: DeviceMesh | None = None  # torch's DeviceMesh; None if each process holds the whole model

    @property
    def count(self) -> int:
        """The number of replicas, which divide the work."""
        return self.mesh.replicate

    @property
    def leads(self) -> bool:
        """Whether this process is the first process of its replica, whose results are used."""
        return self.rank % self.mesh.tensor == 0

    def share(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items that this process computes: replica i modulo the number of replicas computes item i."""
        return islice(items, self.rank // self.mesh.tensor, None, self.count)

    def together(self, name: str, work: Callable[[], T]) -> list[T]:
        """Call `work` in all processes at the same time, and return the results of all processes, by rank. `name` names
        the work in messages, and must be equal in all processes. Raises a SharedError if a process raises a UserError
        or passes another name."""
        if self.mesh.count == 1:
            return [work()]
        outcome: T | UserError
        try:
            outcome = work()
        except SharedError:  # the other processes have raised it as well
            raise
        except UserError as error:
            outcome = error
        outcomes: list[Any] = [None] * self.mesh.count
        distributed.all_gather_object(outcomes, (name, outcome))
        if failed := [result for _, result in outcomes if isinstance(result, UserError)]:
            raise SharedError(str(failed[0]))
        if other := next((rank for rank, (work_name, _) in enumerate(outcomes) if work_name != outcomes[0][0]), 0):
            raise SharedError(
                f"rank {other} computes {outcomes[other][0]}, but rank 0 computes {outcomes[0][0]}: give all ranks the "
                "same model, files and versions"
            )
        return [result for _, result in outcomes]

    def first(self, name: str, work: Callable[[], T]) -> T:
        """Call `work` in the first process only, and return its result in all processes; see `together`."""
        result: Any = self.together(name, lambda: None if self.rank else work())[0]
        return result  # type: ignore[no-any-return]

    def map(self, name: str, function: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """Return the results of a function for all items, in order; each replica computes its share."""
        parts = self.together(name, lambda: [function(item) for item in self.share(items)])[:: self.mesh.tensor]
        return [parts[i % self.count][i // self.count] for i in range(sum(map(len, parts)))]
