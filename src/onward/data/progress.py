"""How long work on data reports its progress: by calling a function of the caller's."""

from collections.abc import Callable

# Called with a description of the task, the bytes that are done, and the bytes in all (0: unknown).
Progress = Callable[[str, int, int], None]


def silent(task: str, done: int, total: int) -> None:
    """Show nothing."""
