"""The type of progress callbacks, and the figures of a finished preparation."""

from collections.abc import Callable
from dataclasses import dataclass, field

# A function that is called with a description of the task, the bytes done, and the bytes in total (0: unknown).
Progress = Callable[[str, int, int], None]


def silent(task: str, done: int, total: int) -> None:
    """Show no progress; the default."""


@dataclass
class Measured:
    """The figures of a preparation. Empty if the preparation was resumed, or if the folder was already complete."""

    seconds: dict[str, float] = field(default_factory=dict)  # seconds of each task
    bytes: int = 0  # bytes of encoded text
    encoder: str = ""  # library that encoded the text

    @property
    def megabytes_per_second(self) -> float:
        return self.bytes / 1e6 / sum(self.seconds.values())
