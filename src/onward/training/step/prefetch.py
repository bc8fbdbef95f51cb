"""Makes items ahead in another thread."""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterable[T], ahead: int = 2) -> Generator[T]:
    """Yield `items`, with the next `ahead` items made in another thread. An error raised while making an item is raised
    when that item is requested. Closing the returned generator discards the items made ahead and ends the thread."""
    source, end = iter(items), object()
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        pending = deque(thread.submit(next, source, end) for _ in range(ahead))
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, source, end))
            yield item  # type: ignore[misc]
    finally:
        thread.shutdown(cancel_futures=True)
