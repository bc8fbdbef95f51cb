"""Learning rate schedules: the learning rate at each step of a run. Does not import torch."""

import math
from collections.abc import Callable
from typing import Literal

from onward.training.config import RunConfig

Schedule = Literal["wsd", "cosine", "linear", "constant"]
ENDED_BY_CLOCK: tuple[Schedule, ...] = ("wsd", "constant")  # have a stable phase: steps may still be unknown

FALL: dict[Schedule, Callable[[float], float]] = {  # from 1 to 0 as the argument goes from 0 to 1; "constant" stays
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "wsd": lambda x: 1 - x,
    "linear": lambda x: 1 - x,
    "constant": lambda x: 1.0,
}


def lr_factor(kind: Schedule, step: int, steps: int, warmup: float, min_ratio: float, decay: float) -> float:
    """Compute the factor of the peak learning rate at a step (0 to steps - 1).

    Every kind begins with a linear warm-up over `warmup`. Then "cosine" (Loshchilov and Hutter 2017) and "linear" fall
    to `min_ratio`, "wsd" (warm-up, stable, decay; Hu et al. 2024) stays at 1 and falls linearly over the last `decay`,
    and "constant" stays at 1. `warmup` and `decay` are fractions of the steps if below 1, else numbers of steps. A
    decaying factor reaches exactly `min_ratio` at the last step, if any step is left after the warm-up. If `steps` is 0
    (not known yet), `warmup` must be a number of steps, and the factor stays at 1 after it.
    """
    if not steps:
        return min(1.0, (step + 1) / (extent(warmup, 0) + 1))
    last = steps - 1
    rise = min(extent(warmup, steps), last)
    if step < rise:
        return (step + 1) / (rise + 1)
    start = max(rise, last - max(1, extent(decay, steps))) if kind == "wsd" else rise
    progress = max(0, step - start) / max(1, last - start)
    return min_ratio + (1 - min_ratio) * FALL[kind](progress)


def learning_rate(config: RunConfig, peak: float) -> Callable[[int], float]:
    """Return the learning rate of a run as a function of the step, counted from 0."""
    c = config
    return lambda step: peak * lr_factor(c.schedule, step, c.steps, c.warmup, c.min_lr_ratio, c.decay)


def extent(part: float, steps: int) -> int:
    """Convert a length, a fraction of `steps` if below 1, to a number of steps."""
    return int(part * steps) if part < 1 else int(part)
