"""Progress reports of work on data, by calls of a function of the caller, and the figures of a finished preparation."""

from collections.abc import Callable
from dataclasses import dataclass, field

# Called with a description of the task, the bytes that are done, and the bytes in all (0: unknown).
Progress = Callable[[str, int, int], None]


def silent(task: str, done: int, total: int) -> None:
    """Show nothing."""


@dataclass
class Measured:
    """Figures of a preparation: its times and its speed. Empty if the preparation was resumed or existed already."""

    seconds: dict[str, float] = field(default_factory=dict)  # by task
    bytes: int = 0  # of text that was encoded
    encoder: str = ""  # the library that encoded it

    @property
    def megabytes_per_second(self) -> float:
        """Megabytes of text per second over all tasks."""
        return self.bytes / 1e6 / sum(self.seconds.values())
