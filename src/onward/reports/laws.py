"""Pictures of scaling laws: the best model for an amount of computation, and laws fitted to runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onward.planning.fits import LossFit, Parabola, Run
from onward.planning.laws import FITTED, LAWS, Frontier, Loss
from onward.reports.panels import curves
from onward.reports.picture import Panel, Picture

POINTS = 60


def optimum_picture(flops: float) -> Picture:
    """What the published laws call best, from a hundredth to a hundred times an amount of operations."""
    budgets = np.logspace(np.log10(flops) - 2, np.log10(flops) + 2, POINTS)
    best = {law.name: np.array([law.optimum(c) for c in budgets]) for law in LAWS}
    powers, mark = np.log10(budgets), {"here": float(np.log10(flops))}
    losses = {law.name: [law.law.loss(*law.optimum(c)) for c in budgets] for law in LAWS if isinstance(law.law, Loss)}
    x_name = "FLOPs, as a power of ten"
    sizes = {name: found[:, 0] for name, found in best.items()}
    tokens = {name: found[:, 1] for name, found in best.items()}
    ratios = {name: found[:, 1] / found[:, 0] for name, found in best.items()}
    caption = (
        "For each amount of operations C = 6 N D, the number of parameters N and of tokens D that give the least loss, "
        f"by the published laws. They were fitted on runs of {FITTED[0]:.0e} to {FITTED[1]:.0e} FLOPs: elsewhere they "
        "part, since each extrapolates in its own way."
    )
    panels = [
        curves("parameters", powers.tolist(), sizes, x_name=x_name, log=True, marks=mark),
        curves("tokens", powers.tolist(), tokens, x_name=x_name, log=True, marks=mark),
        curves("tokens per parameter", powers.tolist(), ratios, x_name=x_name, log=True, marks=mark),
        curves("loss", powers.tolist(), losses, x_name=x_name, marks=mark),
    ]
    return Picture(f"The best model for {flops:.3g} FLOPs", caption, panels)


def profiles(law: Loss, flops: float) -> Panel:
    """The loss by size for amounts of operations around one: IsoFLOP curves."""
    best = law.optimum(flops)[0]
    sizes = np.logspace(np.log10(best) - 1, np.log10(best) + 1, POINTS)
    budgets = {f"{scale * flops:.1e} FLOPs": scale * flops for scale in (0.1, 1, 10)}
    series = {name: [law.loss(n, c / (6 * n)) for n in sizes] for name, c in budgets.items()}
    return curves("IsoFLOP curves", np.log10(sizes).tolist(), series, x_name="parameters, as a power of ten")


def fit_picture(fit: LossFit, runs: Sequence[Run], found: Sequence[Parabola], frontier: Frontier | None) -> Picture:
    """A fitted law: its IsoFLOP curves, the frontier, and what the fit misses of each run."""
    low, high = min(run.flops for run in runs), max(run.flops for run in runs)
    budgets = np.logspace(np.log10(low), np.log10(high) + 1, POINTS)
    powers, mark = np.log10(budgets).tolist(), {"largest run": float(np.log10(high))}
    best = np.array([fit.law.optimum(c) for c in budgets])
    sizes = {"L(N, D)": best[:, 0]}
    if frontier:
        sizes["parabolas"] = np.array([frontier.optimum(c)[0] for c in budgets])
    order = np.argsort([run.flops for run in runs])
    residuals = {"log loss less the fit": np.array(fit.residuals)[order]}
    x_name = "FLOPs, as a power of ten"
    panels = [
        curves("loss of the best model", powers, {"": [fit.law.loss(*n) for n in best]}, x_name=x_name, marks=mark),
        profiles(fit.law, float(np.sqrt(low * high))),
        curves("parameters of the best model", powers, sizes, x_name=x_name, log=True, marks=mark),
        curves("residuals", np.log10([runs[i].flops for i in order]).tolist(), residuals, x_name=x_name),
    ]
    caption = (
        f"A law fitted to {len(runs)} runs, drawn up to ten times the largest: right of the mark it is a forecast. "
        "Residuals without a trend say that the form of the law fits."
    )
    return Picture("Scaling law of these runs", caption, panels)
