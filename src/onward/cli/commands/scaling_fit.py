"""A scaling law of runs, as plain values and as it is printed."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.cli.shared.output import console, print_table
from onward.errors import UserError

if TYPE_CHECKING:
    from onward.planning.fits import LossFit, Run


def fitted(runs: "Sequence[Run]", out: str) -> "tuple[dict[str, Any], LossFit]":
    """The law of runs as plain values, and itself; with its picture, where `out` names a file."""
    from onward.planning.fits import fit_frontier, fit_loss, fit_power, parabolas
    from onward.reports.pictures.laws import fit_picture

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with console.status(f"fitting {len(runs)} runs"):
            law = fit_loss(runs)
            found = parabolas(runs)
        try:
            frontier = fit_frontier(found)
        except UserError:
            frontier = None
        budgets = [(parabola.flops, min(parabola.losses)) for parabola in found]
        power = fit_power(*zip(*budgets)) if len(budgets) >= 4 else None  # type: ignore[arg-type]
    largest = max(run.flops for run in runs)
    forecast = law.forecast(*law.law.optimum(10 * largest)) if law.determined else None
    result = {
        "runs": len(runs),
        "law": asdict(law.law),
        "intervals": law.intervals,
        "objective": law.objective,
        "exponent_of_parabolas": frontier and frontier.exponent,
        "power": power and asdict(power),
        "forecast": forecast and {"flops": 10 * largest, **asdict(forecast)},
        "warnings": [*dict.fromkeys(str(warning.message) for warning in caught)],
    }
    if out:
        fit_picture(law, runs, found, frontier).write(Path(out))
    return result, law


def show_fit(result: dict[str, Any], out: str) -> None:
    law, intervals = result["law"], result["intervals"]
    law = {**law, "a": law["beta"] / (law["alpha"] + law["beta"])}
    between = "{:.4g} to {:.4g}".format
    print_table([{"": name, "fit": f"{law[name]:.4g}", "95 %": between(*intervals[name])} for name in law])
    console.print("\nL(N, D) = E + A / N^alpha + B / D^beta; the best size grows as C^a", soft_wrap=True)
    if exponent := result["exponent_of_parabolas"]:
        console.print(f"by parabolas of each budget it grows as C^{exponent:.3f}", soft_wrap=True)
    if power := result["power"]:
        curve = f"{power['scale']:.3g} C^-{power['exponent']:.3f} + {power['floor']:.3g}"
        console.print(f"loss of the best run of each budget: {curve}", soft_wrap=True)
    if forecast := result["forecast"]:
        console.print(
            f"forecast for {forecast['flops']:.3g} FLOPs, ten times the largest run: {forecast['loss']:.3f} "
            f"({forecast['low']:.3f} to {forecast['high']:.3f}), with {forecast['parameters']:.3g} parameters and "
            f"{forecast['tokens']:.3g} tokens; an extrapolation",
            soft_wrap=True,
        )
    for warning in result["warnings"]:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    if out:
        console.print(f"picture: {out}", markup=False, soft_wrap=True)
