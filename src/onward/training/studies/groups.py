"""Groups of processes that share the runs of a study: each group trains the next run that no other group has
claimed."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep

from torch import distributed

from onward.base.alone import Alone
from onward.base.errors import UserError
from onward.config.mesh import Mesh
from onward.parallel.launch import Launch
from onward.parallel.processes import Processes
from onward.training.config import RunConfig

STUDIES = itertools.count()  # numbers of the studies in this launch, the same in all processes
PAUSE = 0.1  # seconds between two checks of the progress of other groups


@dataclass(frozen=True)
class StudyGroup:
    """One of `count` groups of processes that share the runs of a study. The default is a single group of one
    process."""

    processes: Alone = Alone()
    number: int = 0
    count: int = 1  # number of groups
    store: distributed.Store | None = None  # store that all groups share; None for one process

    @classmethod
    def join(cls, configs: Sequence[RunConfig], seeds: int) -> "StudyGroup":
        """Join this process's group and return it. The study has `seeds` runs for each of `configs`, and a
        group has as many processes as the mesh of a run. Raises a UserError, before any training, if the processes
        cannot form such groups, or if there are fewer runs than groups."""
        launch = Launch.meet()
        sizes = [Mesh.parse(config.mesh).count if config.mesh else 1 for config in configs]
        size = sizes[0]
        if other := next((config for config, count in zip(configs, sizes) if count != size), None):
            raise UserError(
                f"mesh is {configs[0].mesh!r} for one run and {other.mesh!r} for another: choose meshes with the same "
                "number of processes"
            )
        if launch.count % size:
            raise UserError(
                f"mesh {configs[0].mesh!r} needs {size} processes for each run, but {launch.count} were started: "
                f"start a multiple of {size} processes, or give another mesh"
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
        return not self.number and not self.processes.rank

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Context manager: the first process of the first group enters it at once. All other processes wait until the
        first process has left it."""
        while not self.first and self.store is not None and not self.store.check(["prepared"]):
            sleep(PAUSE)
        yield
        if self.first and self.store is not None:
            self.store.set("prepared", "")

    def claim(self, run: int, ended: Callable[[], bool]) -> bool:
        """Claim the run with the number `run` for this group. Returns False if the run has ended, according to
        `ended()`, or if another group has claimed it. All processes of the group must call this together."""
        self.processes.wait()

        def claimed() -> bool:
            mine = str(self.number)
            return not ended() and (
                self.store is None or self.store.compare_set(f"run/{run}", "", mine).decode() == mine
            )

        return self.processes.agreed(lambda: "claimed" * claimed()) == "claimed"

    def wait_until(self, holds: Callable[[], bool], stop: Callable[[], bool]) -> bool:
        """Wait until `holds()` is true in the first process of the group, then return True. If `stop()` is true in any
        process of the group, return False. All processes of the group must call this together."""
        while True:
            held, stopped = self.processes.sum([not self.processes.rank and holds(), stop()])
            if held or stopped:
                return not stopped
            sleep(PAUSE)


ONE_GROUP = StudyGroup()
