"""Plans the steps of a run in advance: the windows that each step trains on."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from typing import TypeVar

import torch

from onward.base.alone import Alone
from onward.data.windows import Batch, TrainingWindows
from onward.training.config import RunConfig
from onward.training.step.trainer import StepPlan

T = TypeVar("T")


class Planner:
    """Makes the StepPlans of a run, each the input of one optimizer step: reads this process's windows (sequences of
    training tokens) of the step, and moves them to its device."""

    def __init__(self, config: RunConfig, windows: TrainingWindows, device: torch.device, processes: Alone) -> None:
        self.config, self.windows, self.device, self.processes = config, windows, device, processes

    def plans(self, position: int, skipped: Sequence[tuple[int, int]] = ()) -> Generator[StepPlan]:
        """Yield the plans of the steps, without end, from the window number `position` on; they are prepared ahead in
        another thread. `skipped` are half-open ranges of window numbers to leave out (the windows of failed steps)."""
        c, left_out = self.config, tuple(skipped)

        def prepare() -> Iterator[StepPlan]:
            where = position
            while True:
                numbers, where = take(where, c.batch_size * c.accumulation, left_out)
                yield StepPlan(self.batches(numbers), numbers, where)

        return prefetch(prepare())

    def first_batch(self) -> Batch:
        return self.batches(range(self.config.batch_size * self.config.accumulation))[0]

    def batches(self, numbers: Sequence[int]) -> list[Batch]:
        """Read the windows in `numbers` that belong to this process, and return them in batches."""
        size = self.config.batch_size
        firsts = range(0, len(numbers), size)[self.processes.batch_rank :: self.processes.batch_count]
        return [self.windows.read(numbers[i : i + size]).to(self.device) for i in firsts]


def prefetch(items: Iterable[T], ahead: int = 2) -> Generator[T]:
    """Yield `items`, with the next `ahead` items prefetched in another thread. An error raised while making an item is
    raised when that item is requested. Closing the returned generator discards prefetched items and ends the thread."""
    source, end = iter(items), object()
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        pending = deque(thread.submit(next, source, end) for _ in range(ahead))
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, source, end))
            yield item  # type: ignore[misc]
    finally:
        thread.shutdown(cancel_futures=True)


def take(position: int, number: int, skipped: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Return the numbers of the next `number` windows from `position` on, without the half-open ranges `skipped`, and
    the position after them."""
    left = (i for i in count(position) if not any(first <= i < end for first, end in skipped))
    taken = list(islice(left, number))
    return taken, taken[-1] + 1 if taken else position
