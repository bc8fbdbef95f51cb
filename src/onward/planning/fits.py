"""Scaling laws fitted to runs: L(N, D) by Chinchilla's third approach, IsoFLOP parabolas by its second, and the loss of
the best run of each budget as a power of the operations.

N: parameters, D: tokens, L: loss in nats per token, C = 6 N D: floating-point operations.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onward.base.errors import UserError
from onward.planning.laws import Frontier, LossLaw

Array = NDArray[np.float64]
DELTA = 1e-3  # delta of the Huber loss of log L (arXiv:2203.15556, section 3.3)
STARTS = [np.linspace(0, 25, 6)] * 2 + [np.linspace(-1, 1, 5)] + [np.linspace(0, 2, 5)] * 2  # appendix D.2
FIRST, KEPT, LAST = 25, 100, 150  # steps from every start, number of best laws kept, further steps from each
LEAST = 4  # minimum number of runs or budgets for a fit
EXPONENTS, FINER = np.linspace(0.01, 1, 100), np.linspace(-0.009, 0.009, 37)  # exponents tried for L(C)
SAME = 0.1  # budgets whose logarithms differ by less are the same


class Unreliable(UserWarning):
    """The warning that a fit to these runs is unreliable, for example because they do not determine the constants of a
    law."""


class RunPoint(NamedTuple):
    """A trained model as a data point of a scaling law: its parameters, its training tokens and its loss."""

    parameters: float
    tokens: float
    loss: float

    @property
    def flops(self) -> float:
        return 6 * self.parameters * self.tokens


@dataclass(frozen=True)
class LossFit:
    """A law of the loss L(N, D) fitted to runs. `intervals` are 95 % intervals over fits to resampled runs, for each
    constant and for "a", where the best N is proportional to C ** a."""

    law: LossLaw
    objective: float  # sum of the Huber losses
    intervals: dict[str, tuple[float, float]]
    residuals: list[float]  # log of the loss minus the log predicted by the fit
    resampled: list[LossLaw]  # laws fitted to resampled runs

    @property
    def determined(self) -> bool:
        """Whether both exponents are above 0, so that the loss falls with parameters and with tokens, and below 2, far
        above those of published laws."""
        return 0 < self.law.alpha < 2 and 0 < self.law.beta < 2

    def forecast(self, parameters: float, tokens: float, seed: int = 0) -> Forecast:
        """Predict the loss of a new run. Its 95 % interval comes from the laws fitted to resampled runs (a bootstrap).
        Each prediction has the residual of a random run added to its logarithm, since a new run also deviates."""
        noise = np.random.default_rng(seed).choice(self.residuals, len(self.resampled))
        n, d = np.float64(parameters), np.float64(tokens)
        with np.errstate(over="ignore", invalid="ignore"):  # some resampled runs do not determine a law
            losses = [law.loss(n, d) * np.exp(error) for law, error in zip(self.resampled, noise)]
            losses = [math.inf if np.isnan(loss) else loss for loss in losses]  # A / N ** alpha is inf / inf
            low, high = np.percentile(losses, [2.5, 97.5], method="nearest") if losses else (np.nan, np.nan)
            return Forecast(parameters, tokens, float(self.law.loss(n, d)), float(low), float(high))


@dataclass(frozen=True)
class Forecast:
    """The predicted loss of a run, with its 95 % interval."""

    parameters: float
    tokens: float
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Parabola:
    """The loss over log parameters of runs with about equal `flops`; the best size is at its minimum (Chinchilla's
    IsoFLOP profiles)."""

    flops: float
    sizes: list[float]
    losses: list[float]
    best: float | None  # None if the parabola has no minimum
    inside: bool  # whether the best size lies within the sizes of the runs


@dataclass(frozen=True)
class PowerFit:
    """The loss L(C) = scale * C ** -exponent + floor of the best run of C operations, with 95 % intervals."""

    scale: float
    exponent: float
    floor: float
    intervals: dict[str, tuple[float, float]]

    def loss(self, flops: float) -> float:
        return float(self.scale * flops**-self.exponent + self.floor)


def checked(runs: Sequence[RunPoint]) -> None:
    """Raise a UserError for too few or invalid runs; warn of a model that is worse after more tokens."""
    if len(runs) < LEAST:
        raise UserError(
            f"Cannot fit a law to {len(runs)} runs: give at least {LEAST}, of different sizes and numbers of tokens"
        )
    for number, run in enumerate(runs, 1):
        if not all(np.isfinite(run)) or min(run) <= 0:
            raise UserError(
                f"Cannot fit a law to run {number} with {run.parameters:g} parameters, {run.tokens:g} "
                f"tokens and loss {run.loss}: leave this run out"
            )
    for run, other in product(runs, runs):
        if run.parameters == other.parameters and run.tokens < other.tokens and run.loss < other.loss:
            warnings.warn(
                f"the model of {run.parameters:g} parameters is worse after {other.tokens:g} tokens ({other.loss:.4g}) "
                f"than after {run.tokens:g} ({run.loss:.4g})",
                Unreliable,
                stacklevel=2,
            )
            return


def objective(x: Array, n: Array, d: Array, loss: Array) -> tuple[Array, Array, Array]:
    """The Huber losses (S, R), the errors of log L (S, R) and their derivatives (S, R, 5), for S laws x (S, 5) = (log
    A, log B, log E, alpha, beta) and the logarithms of R runs (R,)."""
    a, b, e, alpha, beta = x.T[:, :, None]
    terms = np.stack([a - alpha * n, b - beta * d, np.broadcast_to(e, (len(x), len(n)))])
    top = terms.max(0)
    shares = np.exp(terms - top)
    total = shares.sum(0)
    shares /= total
    error = top + np.log(total) - loss
    size = np.abs(error)
    value = np.where(size <= DELTA, error**2 / 2, DELTA * (size - DELTA / 2))
    return value, error, np.stack([*shares, -n * shares[0], -d * shares[1]], -1)


def minima(x: Array, counts: Array, rounds: int, *numbers: Array) -> tuple[Array, Array]:
    """The minima (S, 5) that Levenberg-Marquardt steps reach from all laws x (S, 5) at once, and their objectives (S,);
    `counts` (S, R) or (1, R) weight the runs."""
    damping = np.ones(len(x))
    value, error, slopes = objective(x, *numbers)
    value = (counts * value).sum(1)
    for _ in range(rounds):
        weights = counts * np.minimum(1, DELTA / np.maximum(np.abs(error), 1e-300))
        weighted = slopes * weights[..., None]
        curvature = weighted.mT @ slopes
        diagonal = np.einsum("sii->si", curvature)
        diagonal += damping[:, None] * (diagonal + 1e-12)
        step = np.linalg.solve(curvature, np.einsum("sri,sr->si", weighted, error)[..., None])[..., 0]
        tried = objective(x - step, *numbers)
        total = (counts * tried[0]).sum(1)
        better = total < value
        damping = np.where(better, damping / 5, damping * 3).clip(1e-9, 1e9)
        x, value = np.where(better[:, None], x - step, x), np.where(better, total, value)
        error = np.where(better[:, None], tried[1], error)
        slopes = np.where(better[:, None, None], tried[2], slopes)
    return x, value


def fit_loss(runs: Sequence[RunPoint], resamples: int = 200, seed: int = 0) -> LossFit:
    """Fit L(N, D) to runs by minimizing the sum of Huber losses from each starting point of the grid in Chinchilla's
    appendix; with their mean the search would stop too early (arXiv:2404.10102).

    The intervals come from `resamples` random resamplings of the runs (drawn with `seed`); each of these fits starts
    from the best law. Raises a UserError for fewer than four runs, for numbers that are not positive and finite, and if
    all runs have the same size or number of tokens.
    """
    checked(runs)
    for what, given in (("size", {r.parameters for r in runs}), ("number of tokens", {r.tokens for r in runs})):
        if len(given) < 2:
            raise UserError(f"Cannot fit a law, because all runs have the same {what}: vary it")
    numbers = tuple(np.log(np.array(runs, float).T))
    once = np.ones((1, len(runs)))
    starts = np.array([*product(*STARTS)])
    reached = [minima(part, once, FIRST, *numbers) for part in np.array_split(starts, len(starts) // 250)]
    x, values = (np.concatenate(parts) for parts in zip(*reached))
    x, values = minima(x[np.argsort(values)[:KEPT]], once, LAST, *numbers)
    best = x[values.argmin()]
    choose = np.random.default_rng(seed)
    counts = choose.multinomial(len(runs), [1 / len(runs)] * len(runs), size=resamples).astype(float)
    resampled, _ = minima(np.repeat(best[None], resamples, 0), counts, LAST, *numbers)
    law = law_of(best)
    residuals = numbers[2] - np.log([law.loss(run.parameters, run.tokens) for run in runs])
    fit = LossFit(
        law,
        float(values.min()),
        intervals([constants(x) for x in resampled]),
        residuals.tolist(),
        [law_of(x) for x in resampled],
    )
    if not fit.determined:
        exponents = f"alpha is {law.alpha:.3g} and beta {law.beta:.3g}"
        message = f"the runs do not determine a law: {exponents}, but both must be between 0 and 2"
        warnings.warn(message, Unreliable, stacklevel=2)
    return fit


def law_of(x: Array) -> LossLaw:
    with np.errstate(over="ignore"):  # see `forecast`
        return LossLaw(*np.exp(x[[2, 0, 1]]).tolist(), *x[3:].tolist())


def constants(x: Array) -> dict[str, float]:
    law = law_of(x)
    return {**vars(law), "a": law.beta / (law.alpha + law.beta)}


def intervals(samples: Sequence[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """The 2.5th and 97.5th percentiles of each named value."""
    if not samples:
        return {}
    ends = {name: np.percentile([sample[name] for sample in samples], [2.5, 97.5]) for name in samples[0]}
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


def parabolas(runs: Sequence[RunPoint]) -> list[Parabola]:
    """Fit a parabola to each group of runs with about equal operations and at least three sizes."""
    checked(runs)
    groups: list[list[RunPoint]] = []
    for run in sorted(runs, key=lambda run: run.flops):
        if groups and np.log(run.flops / groups[-1][0].flops) < SAME:
            groups[-1].append(run)
        else:
            groups.append([run])
    result = []
    for group in groups:
        if len({run.parameters for run in group}) < 3:
            continue
        group.sort()
        n, losses = np.log([run.parameters for run in group]), [run.loss for run in group]
        curvature, slope, _ = np.polyfit(n - n.mean(), losses, 2)
        best = float(np.exp(n.mean() - slope / (2 * curvature))) if curvature > 0 else None
        inside = best is not None and group[0].parameters <= best <= group[-1].parameters
        flops = float(np.exp(np.mean([np.log(run.flops) for run in group])))
        if not inside:
            warnings.warn(
                f"{flops:.3g} FLOPs: the best size lies outside the sizes that were trained", Unreliable, stacklevel=2
            )
        result.append(Parabola(flops, [run.parameters for run in group], losses, best, inside))
    return result


def fit_frontier(curves: Sequence[Parabola]) -> Frontier:
    """Fit the best size as a power of the operations; raises a UserError for fewer than two minima that lie within the
    sizes of the runs."""
    inside = [curve for curve in curves if curve.best is not None and curve.inside]
    if len(inside) < 2:
        raise UserError(
            "Cannot fit a law of the best size, because fewer than two budgets have their best size between "
            "trained sizes: train smaller and larger models"
        )
    exponent, scale = np.polyfit(
        np.log([curve.flops for curve in inside]), np.log([curve.best or 1 for curve in inside]), 1
    )
    return Frontier(float(np.exp(scale)), float(exponent))


def fit_power(flops: Sequence[float], losses: Sequence[float], resamples: int = 50, seed: int = 0) -> PowerFit:
    """Fit the loss L(C) = scale * C ** -exponent + floor by least squares of relative errors: `flops` are the budgets
    C, `losses` the losses of the best run of each. The intervals come from `resamples` random resamplings of these
    pairs, drawn with `seed`. Raises a UserError for fewer than four values."""
    if len(flops) < LEAST:
        raise UserError(f"Cannot fit a curve of three constants to {len(flops)} budgets: give at least {LEAST}")
    c, wanted = np.array(flops, float), np.array(losses, float)

    def fitted(c: Array, wanted: Array) -> dict[str, float]:
        # for each exponent tried, scale and floor are a linear problem
        middle = np.exp(np.log(c).mean())

        def tried(exponent: float) -> tuple[float, float, float, float]:
            columns = np.stack([(c / middle) ** -exponent, np.ones(len(c))], 1) / wanted[:, None]
            scale, floor = np.linalg.lstsq(columns, np.ones(len(c)))[0]
            if floor < 0:
                scale, floor = np.linalg.lstsq(columns[:, :1], np.ones(len(c)))[0].item(), 0.0
            error = np.square(columns @ [scale, floor] - 1).sum()
            return float(error), float(scale * middle**exponent), float(exponent), float(floor)

        best = min(tried(exponent) for exponent in EXPONENTS)
        best = min(tried(best[2] + shift) for shift in FINER)
        return dict(zip(("scale", "exponent", "floor"), best[1:]))

    best, choose, samples = fitted(c, wanted), np.random.default_rng(seed), list[dict[str, float]]()
    while len(samples) < resamples:
        some = choose.integers(len(c), size=len(c))
        if len(set(some.tolist())) >= 3:
            samples.append(fitted(c[some], wanted[some]))
    return PowerFit(**best, intervals=intervals(samples))
