"""Progress bars on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from onward.cli.shared.output import console
from onward.data.progress import Progress


@contextmanager
def progress_bars(counted: bool = False) -> Iterator[Progress]:
    """Yield a function (task, done, total) that shows a bar for each task on a terminal: bytes and the elapsed time or,
    with `counted`, items and the remaining time."""
    of_items = MofNCompleteColumn(), TimeRemainingColumn()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *(of_items if counted else (DownloadColumn(), TimeElapsedColumn())),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def show(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total or None)
            bars.update(tasks[task], completed=done)

        yield show
