"""Progress reports on data, by calls of the caller's function, and the figures of a finished preparation."""

from collections.abc import Callable
from dataclasses import dataclass, field

# Called with a description of the task, the bytes that are done, and the bytes in all (0: unknown).
Progress = Callable[[str, int, int], None]


def silent(task: str, done: int, total: int) -> None:
    """The default for callers that show no progress."""


@dataclass
class Measured:
    """The times of a preparation. Empty if it was resumed or existed already."""

    seconds: dict[str, float] = field(default_factory=dict)  # seconds of each task
    bytes: int = 0  # bytes of encoded text
    encoder: str = ""  # library that encoded the text

    @property
    def megabytes_per_second(self) -> float:
        return self.bytes / 1e6 / sum(self.seconds.values())
