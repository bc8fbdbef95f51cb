"""Tests whether two sets of measurements differ by more than noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def shown(self) -> bool:
        """Whether the interval excludes 0, so that the difference exceeds noise."""
        return self.low > 0 or self.high < 0


def paired_difference(one: Sequence[float], other: Sequence[float], level: float = 0.95) -> Difference | None:
    """Compute the mean of `one` minus `other`, pair by pair, with Student's confidence interval: mean +- t s / sqrt(n)
    with n - 1 degrees of freedom. None for fewer than two pairs, which give no estimate of noise.

    Pairs share a seed and therefore the order of the data: their differences vary less than the measurements.
    """
    differences = [a - b for a, b in zip(one, other, strict=True)]
    if len(differences) < 2:
        return None
    mean, count = fmean(differences), len(differences)
    reach = t_quantile(level, count - 1) * stdev(differences) / math.sqrt(count)
    return Difference(mean, mean - reach, mean + reach)


def t_quantile(level: float, freedom: int) -> float:
    """Compute the quantile t with P(|T| < t) = level, for Student's distribution with `freedom` degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, freedom) < level else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def t_share(angle: float, freedom: int) -> float:
    """Compute P(|T| < t) for t = tan(angle) sqrt(freedom) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), freedom % 2
    term = total = 0.0 if freedom == 1 else cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
