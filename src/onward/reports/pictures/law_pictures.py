"""Pictures of scaling laws: the best model for an amount of computation, and laws fitted to runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onward.planning.fits import Array, LossFit, Parabola, RunPoint
from onward.planning.laws import FITTED, LAWS, REFIT, Frontier, LossLaw
from onward.reports.pictures.panels import curves
from onward.reports.pictures.picture import Panel, Picture

POINTS = 60


def optimum_picture(flops: float) -> Picture:
    """Draw the best model size and number of tokens by the published scaling laws, for compute budgets from a hundredth
    to a hundred times `flops`."""
    budgets = np.logspace(np.log10(flops) - 2, np.log10(flops) + 2, POINTS)
    best = {law.name: np.array([law.optimum(c) for c in budgets]) for law in LAWS}
    powers, mark = np.log10(budgets), {"here": float(np.log10(flops))}
    losses = {
        law.name: [law.law.loss(*law.optimum(c)) for c in budgets] for law in LAWS if isinstance(law.law, LossLaw)
    }
    x_name = "FLOPs, as a power of ten"
    sizes = {name: points[:, 0] for name, points in best.items()}
    tokens = {name: points[:, 1] for name, points in best.items()}
    ratios = {name: points[:, 1] / points[:, 0] for name, points in best.items()}
    caption = (
        "For each compute budget C = 6 N D, the number of parameters N and of tokens D with the lowest loss by the "
        f"published laws. Hoffmann et al. compared sizes at {FITTED[0]:.0e} to {FITTED[1]:.0e} FLOPs; beyond this "
        "range, the laws are extrapolations, and differ."
    )
    panels = [
        curves("parameters", powers.tolist(), sizes, x_name=x_name, log=True, marks=mark),
        curves("tokens", powers.tolist(), tokens, x_name=x_name, log=True, marks=mark),
        curves("tokens per parameter", powers.tolist(), ratios, x_name=x_name, log=True, marks=mark),
        curves("loss", powers.tolist(), losses, x_name=x_name, marks=mark),
        profiles(REFIT, flops),
    ]
    return Picture(f"The best model for {flops:.3g} FLOPs", caption, panels)


def profiles(law: LossLaw, flops: float) -> Panel:
    """Loss by model size for a tenth, one and ten times `flops`."""
    best = law.optimum(flops)[0]
    sizes = np.logspace(np.log10(best) - 1, np.log10(best) + 1, POINTS)
    budgets = {f"{scale * flops:.1e} FLOPs": scale * flops for scale in (0.1, 1, 10)}
    series = {name: [law.loss(n, c / (6 * n)) for n in sizes] for name, c in budgets.items()}
    return curves("IsoFLOP curves", np.log10(sizes).tolist(), series, x_name="parameters, as a power of ten")


def isoflops(law: LossLaw, runs: Sequence[RunPoint], profiles_of_runs: Sequence[Parabola]) -> Panel:
    """Loss by model size for each budget with runs of several sizes: the curve of `law`, and the runs as points."""
    sizes = np.log10([run.parameters for run in runs])
    x = np.linspace(sizes.min() - 0.1, sizes.max() + 0.1, POINTS)
    budgets = [parabola.flops for parabola in profiles_of_runs]
    series = {f"{flops:.1e} FLOPs": [law.loss(n, flops / 6 / n) for n in 10**x] for flops in budgets}
    dots = [point for parabola in profiles_of_runs for point in zip(np.log10(parabola.sizes), parabola.losses)]
    return curves("IsoFLOP curves, and runs", x.tolist(), series, x_name="parameters, as a power of ten", dots=dots)


def divided(
    best: Mapping[str, Array], values: Mapping[str, Array], smallest: float, largest: float
) -> dict[str, Array]:
    """Divide the curve of each way to find the best model: `best` has its (parameters, tokens) at each budget, and
    `values` the heights of its curve. Points with a best size below `smallest` or above `largest`, the sizes that were
    trained, get curves of their own."""
    parts = {}
    for way, models in best.items():
        inside = (smallest <= models[:, 0]) & (models[:, 0] <= largest)
        parts[way] = np.where(inside, values[way], np.nan)
    for way, models in best.items():
        for where, outside in (("below", models[:, 0] < smallest), ("above", models[:, 0] > largest)):
            if outside.any():
                parts[f"{way}, {where} the trained sizes"] = np.where(outside, values[way], np.nan)
    return parts


def fit_picture(
    fit: LossFit, runs: Sequence[RunPoint], profiles_of_runs: Sequence[Parabola], frontier: Frontier | None
) -> Picture:
    """Draw a law fitted to runs: IsoFLOP curves, residuals and, if the runs determine the law, the loss and the best
    sizes by budget."""
    low, high = min(run.flops for run in runs), max(run.flops for run in runs)
    made, x_name = np.log10([run.flops for run in runs]), "FLOPs, as a power of ten"
    panels = [isoflops(fit.law, runs, profiles_of_runs)] if profiles_of_runs else []
    if fit.determined:
        budgets = np.logspace(np.log10(low), np.log10(high) + 1, POINTS)
        powers, marks = np.log10(budgets).tolist(), {"largest run": float(np.log10(high))}
        best = {"L(N, D)": np.array([fit.law.optimum(c) for c in budgets])}
        sizes = [run.parameters for run in runs]
        trained = min(sizes), max(sizes)
        losses = {"L(N, D)": np.array([fit.law.loss(*n) for n in best["L(N, D)"]])}
        losses = divided(best, losses, *trained)
        if frontier:
            best["parabolas"] = np.array([frontier.optimum(c) for c in budgets])
        dots = [*zip(made, (run.loss for run in runs))]
        title = "loss: runs, and the best model"
        panels = panels or [profiles(fit.law, float(np.sqrt(low * high)))]
        panels.insert(0, curves(title, powers, losses, x_name=x_name, marks=marks, dots=dots))
        for place, name in enumerate(("parameters", "tokens")):
            series = divided(best, {way: models[:, place] for way, models in best.items()}, *trained)
            panels.append(curves(f"{name} of the best model", powers, series, x_name=x_name, log=True, marks=marks))
    zero, dots = {"the law": np.zeros(2)}, [*zip(made, fit.residuals)]
    ends = [float(made.min()), float(made.max())]
    panels.append(curves("residuals: log loss minus that of the law", ends, zero, x_name=x_name, dots=dots))
    caption = (
        f"A law fitted to {len(runs)} runs, drawn up to ten times the largest: right of the mark it is a forecast. "
        "Best sizes below or above all trained sizes have separate curves: these are extrapolations, too. Residuals "
        "without a trend show that the form of the law fits."
    )
    return Picture("Scaling law of these runs", caption, panels)
