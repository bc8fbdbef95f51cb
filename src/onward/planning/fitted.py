"""All fits to the same runs: L(N, D), the parabola of each budget, and the loss as a power of the operations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onward.base.errors import UserError
from onward.planning.fits import (
    LEAST,
    Forecast,
    LossFit,
    Parabola,
    PowerFit,
    RunPoint,
    fit_frontier,
    fit_loss,
    fit_power,
    parabolas,
)
from onward.planning.laws import Frontier

LARGER = 10.0  # operations of the forecast run, relative to the largest run


@dataclass(frozen=True)
class FittedLaw:
    """All scaling laws fitted to `runs`, and the warnings of the fits."""

    runs: Sequence[RunPoint]
    loss: LossFit
    parabolas: list[Parabola]
    frontier: Frontier | None  # None if fewer than two parabolas have their minimum within the sizes of their runs
    power: PowerFit | None  # None for fewer than LEAST parabolas
    warnings: list[str]

    @property
    def larger_flops(self) -> float:
        return LARGER * max(run.flops for run in self.runs)

    def forecast(self) -> Forecast | None:
        """Predict the loss of the best model for ten times the largest run's operations; None if the runs do not
        determine the law."""
        return self.loss.forecast(*self.loss.law.optimum(self.larger_flops)) if self.loss.determined else None

    def plain(self) -> dict[str, Any]:
        forecast = self.forecast()
        return {
            "runs": len(self.runs),
            "law": asdict(self.loss.law),
            "intervals": self.loss.intervals,
            "objective": self.loss.objective,
            "exponent_of_parabolas": self.frontier and self.frontier.exponent,
            "power": self.power and asdict(self.power),
            "forecast": forecast and {"flops": self.larger_flops, **asdict(forecast)},
            "warnings": [*self.warnings],
        }


def fit_runs(runs: Sequence[RunPoint]) -> FittedLaw:
    """Fit all scaling laws to runs, and collect the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss, curves = fit_loss(runs), parabolas(runs)
        try:
            frontier = fit_frontier(curves)
        except UserError:
            frontier = None
        budgets = [(parabola.flops, min(parabola.losses)) for parabola in curves]
        power = fit_power(*zip(*budgets)) if len(budgets) >= LEAST else None  # type: ignore[arg-type]
    return FittedLaw(runs, loss, curves, frontier, power, [*dict.fromkeys(str(warning.message) for warning in caught)])
