"""The learning rate's course over a run. Does not import torch."""

import math
from collections.abc import Callable
from typing import Literal

Schedule = Literal["cosine", "wsd", "linear", "constant"]

FALL: dict[Schedule, Callable[[float], float]] = {  # from 1 to 0 as the argument goes from 0 to 1
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "wsd": lambda x: 1 - x,
    "linear": lambda x: 1 - x,
    "constant": lambda x: 1.0,
}


def lr_factor(kind: Schedule, step: int, steps: int, warmup: float, min_ratio: float, decay: float) -> float:
    """The factor of the peak learning rate at a step (0 to steps - 1).

    Every kind begins with a linear warm-up over the fraction `warmup` of the steps. Then "cosine" (Loshchilov and
    Hutter 2017) and "linear" fall to `min_ratio`, "wsd" (warm-up, stable, decay; Hu et al. 2024) stays at 1 and falls
    linearly over the last fraction `decay` of the steps, and "constant" stays at 1. A factor that falls is exactly
    `min_ratio` at the last step, if any step is left after the warm-up.
    """
    last = steps - 1
    rise = min(int(warmup * steps), last)
    if step < rise:
        return (step + 1) / (rise + 1)
    start = max(rise, last - max(1, int(decay * steps))) if kind == "wsd" else rise
    progress = max(0, step - start) / max(1, last - start)
    return min_ratio + (1 - min_ratio) * FALL[kind](progress)
