"""Test whether two sets of measurements differ by more than noise."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev


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
    """The mean of `one` minus `other` with Student's confidence interval: mean +- t s / sqrt(n) with n - 1 degrees of
    freedom. None for fewer than two pairs, which give no estimate of noise.

    Runs of a pair share a seed and therefore the order of the data: their differences vary less than the
    measurements."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    if len(differences) < 2:
        return None
    mean, count = fmean(differences), len(differences)
    # Student's t, because the usual three seeds are too few for a bootstrap
    reach = t_quantile(level, count - 1) * stdev(differences) / math.sqrt(count)
    return Difference(mean, mean - reach, mean + reach)


def t_quantile(level: float, freedom: int) -> float:
    """Return t with P(|T| < t) = level for Student's distribution with `freedom` degrees of freedom: the factor of a
    confidence interval."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, freedom) < level else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def t_share(angle: float, freedom: int) -> float:
    """Return P(|T| < t) for t = tan(angle) sqrt(freedom) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), freedom % 2
    term = total = 0.0 if freedom == 1 else cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def bootstrap(one: Sequence[float], other: Sequence[float], level: float = 0.95, rounds: int = 2000) -> Difference:
    """The mean of `one` minus `other` with the percentile interval of the bootstrap (Efron and Tibshirani 1993, 13.3):
    the means of `rounds` samples of the pairs, drawn with replacement from a fixed seed."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    rng, count = random.Random(0), len(differences)
    means = sorted(fmean(rng.choices(differences, k=count)) for _ in range(rounds))
    outside = round((1 - level) / 2 * (rounds - 1))
    return Difference(fmean(differences), means[outside], means[-1 - outside])


def mcnemar(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p-value of McNemar's exact test (McNemar 1947). Of the questions that only one of two equally good
    models answers correctly, each model is expected to answer half. With grades between 0 and 1, this is the sign test
    on the questions whose grades differ."""
    first = sum(a > b for a, b in zip(one, other, strict=True))
    count = first + sum(b > a for a, b in zip(one, other))
    tail = sum(math.comb(count, k) for k in range(min(first, count - first) + 1))
    return min(1.0, 2 * tail / 2**count)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons, so that the chance of any false positive is at most the significance
    level (Holm 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    result, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        result[index] = highest
    return result


def smallest_difference(one: Sequence[float], other: Sequence[float], level: float = 0.95, power: float = 0.8) -> float:
    """The smallest difference of means that this comparison would detect with probability `power`, given how much
    paired differences vary: (z(level) + z(power)) s / sqrt(n). NaN for fewer than two pairs."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    if len(differences) < 2:
        return math.nan
    z = NormalDist().inv_cdf
    return (z((1 + level) / 2) + z(power)) * stdev(differences) / math.sqrt(len(differences))
