"""Choosing between ways that compute the same thing by timing them."""

from collections.abc import Callable, Mapping
from time import perf_counter


def fastest(ways: Mapping[str, Callable[[], object]], rounds: int = 5) -> str:
    """The name of the way whose best of `rounds` runs, taken in turns after one to warm up, is the shortest."""
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(rounds + 1):
        for name, run in ways.items():
            start = perf_counter()
            run()
            if turn:
                best[name] = min(best[name], perf_counter() - start)
    return min(best, key=best.__getitem__)
