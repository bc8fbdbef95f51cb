"""Groups of processes that share the runs of a study: each group trains the next run that no other has begun."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep

from torch import distributed

from onward.config.mesh import Mesh
from onward.errors import UserError
from onward.training.config import RunConfig
from onward.training.processes import Launch, Processes

STUDIES = itertools.count()  # numbers of the studies of this launch, the same in all processes
PAUSE = 0.1  # seconds between two looks at the work of other groups


@dataclass(frozen=True)
class Group:
    """One of the groups of processes that share the runs of a study, with the processes of the group; by default the
    only group, of one process."""

    processes: Processes = Processes()
    number: int = 0
    count: int = 1  # groups
    store: distributed.Store | None = None  # store that all groups share; None for one process

    @classmethod
    def join(cls, configs: Sequence[RunConfig], seeds: int) -> "Group":
        """Join the group of this process, if torchrun started several: each group has as many processes as the mesh of
        the runs, `seeds` for each of `configs`. Raises a UserError, before any training, if the processes cannot form
        such groups, or if there are fewer runs than groups."""
        launch = Launch.meet()
        sizes = [Mesh.parse(config.mesh).count if config.mesh else 1 for config in configs]
        size = sizes[0]
        if other := next((one for one, its in zip(configs, sizes) if its != size), None):
            raise UserError(
                f"mesh is {configs[0].mesh!r} for one run and {other.mesh!r} for another: choose meshes with the same "
                "number of processes"
            )
        if launch.count % size:
            raise UserError(
                f"mesh is {configs[0].mesh!r}, which takes {size} processes for each run, and there are "
                f"{launch.count}: start a multiple of {size}, or give another mesh"
            )
        count, runs = launch.count // size, len(configs) * seeds
        if count > runs:
            raise UserError(
                f"there are {runs} runs for {launch.count} processes, {size} for each run: start at most {runs * size}"
            )
        processes = Processes.join(size)
        store = distributed.PrefixStore(f"study/{next(STUDIES)}", launch.store) if launch.store else None
        return cls(processes, launch.rank // size, count, store)

    @property
    def first(self) -> bool:
        """Whether this process is the first of all groups."""
        return not self.number and not self.processes.rank

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """A context that the first process of all groups enters at once, and the others when that one has left it."""
        while not self.first and self.store is not None and not self.store.check(["prepared"]):
            sleep(PAUSE)
        yield
        if self.first and self.store is not None:
            self.store.set("prepared", "")

    def takes(self, run: int, ended: Callable[[], bool]) -> bool:
        """Return whether this group is to train a run, given its number: the run has not ended, as `ended` tells, and
        no other group has taken it. All processes of the group must call this together."""
        self.processes.wait()

        def take() -> bool:
            mine = str(self.number)
            return not ended() and (
                self.store is None or self.store.compare_set(f"run/{run}", "", mine).decode() == mine
            )

        return self.processes.agreed(lambda: "taken" * take()) == "taken"

    def wait_until(self, holds: Callable[[], bool], stop: Callable[[], bool]) -> bool:
        """Wait until `holds()` is true in the first process of the group, and return True, or until `stop()` is true in
        one of its processes, and return False. All processes of the group must call this together."""
        while True:
            held, stopped = self.processes.sum([not self.processes.rank and holds(), stop()])
            if held or stopped:
                return not stopped
            sleep(PAUSE)


ALONE = Group()
