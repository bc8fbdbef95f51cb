"""Items made ahead by another thread."""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterable[T], ahead: int = 2) -> Generator[T]:
    """The items of an iterable, of which a thread makes the next `ahead` while the caller works on one.

    An error that is raised while an item is made is raised when that item is asked for. Closing the iterator discards
    the items made ahead and ends the thread.
    """
    source, end = iter(items), object()
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        pending = deque(thread.submit(next, source, end) for _ in range(ahead))
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, source, end))
            yield item  # type: ignore[misc]
    finally:
        thread.shutdown(cancel_futures=True)
