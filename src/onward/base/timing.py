"""Chooses the fastest of functions that compute the same result, by timing them."""

import math
from collections.abc import Callable, Mapping
from time import perf_counter


def fastest(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int = 5,
    limit: float = math.inf,
    clock: Callable[[], float] = perf_counter,
) -> str:
    """Return the name of the candidate function whose fastest call took the least time.

    Each candidate is called once to warm up, and then `rounds` times, in turns. No new turn begins once `limit` seconds
    of `clock` have passed, but each candidate is timed at least once.
    """
    best, began = dict.fromkeys(candidates, math.inf), clock()
    for turn in range(rounds + 1):
        if turn > 1 and clock() - began > limit:
            break
        for name, run in candidates.items():
            start = clock()
            run()
            if turn:
                best[name] = min(best[name], clock() - start)
    return min(best, key=best.__getitem__)
