"""Map window i of a run on several weighted sources to a source and one of its windows.

Shapes: S sources, N windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onward.base.errors import UserError
from onward.config.mixtures import MovingWeight, points_of

BLOCK = 10_000  # number of windows after which the order of the sources repeats, with constant weights
GRID = 1 << 14  # steps of the sum that approximates the integral of changing weights over a run

SourceRanks = tuple[NDArray[np.int64], NDArray[np.int64]]


class Interleaving(Protocol):
    """The source of each window of a run, as a pure function of the window's number."""

    def locate(self, numbers: NDArray[np.int64]) -> SourceRanks:
        """Return the source of each window number (N,), and the window's number among the windows of that source."""


class Constant:
    """Constant weights: in every BLOCK windows, each source has its share of windows, rounded and evenly spread."""

    def __init__(self, weights: Sequence[float]) -> None:
        if not min(weights) * BLOCK > sum(weights):  # also refuses NaN
            raise UserError(f"weights are {tuple(weights)}: each must be positive, and above 1/{BLOCK:,} of their sum")
        exact = np.array(weights) / sum(weights) * BLOCK
        self.counts = rounded(exact)
        self.source, self.rank = spread([(np.arange(n) + 0.5) / n for n in self.counts])

    def locate(self, numbers: NDArray[np.int64]) -> SourceRanks:
        block, place = np.divmod(numbers, BLOCK)
        source = self.source[place]
        return source, block * self.counts[source] + self.rank[place]


class Curriculum:
    """Weights that change over a run of N windows: the first n windows contain each source in proportion to its mean
    share of the weights over them, rounded. The N windows after the run have the sources in reverse order, the next N
    in the original order, and so on."""

    def __init__(self, weights: Sequence[float | MovingWeight], total: int) -> None:
        grid = (np.arange(GRID) + 0.5) / GRID
        values = np.stack([np.interp(grid, *np.array(points_of(weight)).T) for weight in weights], 1)  # (GRID, S)
        added = np.cumsum(values / values.sum(1, keepdims=True), 0) * (total / GRID)
        edges, sofar = np.arange(GRID + 1) / GRID, np.concatenate([np.zeros((1, len(weights))), added])
        self.total, self.counts = total, rounded(sofar[-1])
        # window k of a source is placed where the source's cumulative share reaches k + 1/2
        middles = [(np.arange(n) + 0.5) * (exact / n if n else 1) for n, exact in zip(self.counts, sofar[-1])]
        self.source, self.rank = spread([np.interp(m, sofar[:, s], edges) for s, m in enumerate(middles)])

    def locate(self, numbers: NDArray[np.int64]) -> SourceRanks:
        times, index = np.divmod(numbers, self.total)
        back = times % 2 == 1
        index = np.where(back, self.total - 1 - index, index)
        source, rank = self.source[index], self.rank[index]
        rank = np.where(back, self.counts[source] - 1 - rank, rank)
        return source, times * self.counts[source] + rank


def interleaving(weights: Sequence[float | MovingWeight], total: int) -> Interleaving:
    if any(isinstance(weight, MovingWeight) for weight in weights):
        return Curriculum(weights, total)
    return Constant([weight for weight in weights if not isinstance(weight, MovingWeight)])


def spread(at: Sequence[NDArray[np.float64]]) -> SourceRanks:
    """Merge the windows of all sources by their positions `at` in the run, which ascend per source; return the source
    of each window and its rank in that source."""
    order = np.argsort(np.concatenate(at), kind="stable")
    ranks: Any = [np.arange(len(positions)) for positions in at]
    return np.repeat(np.arange(len(at)), [len(positions) for positions in at])[order], np.concatenate(ranks)[order]


def rounded(exact: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round numbers with an integer sum by the largest-remainder method, which preserves the sum."""
    counts = np.floor(exact).astype(np.int64)
    left = round(exact.sum()) - counts.sum()
    counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
    return counts
