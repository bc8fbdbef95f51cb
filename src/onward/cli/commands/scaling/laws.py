"""Fit a scaling law with a status line, draw it and print it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.cli.shared.output import console, print_table

if TYPE_CHECKING:
    from onward.planning.fits import RunPoint
    from onward.planning.fitted import FittedLaw


def fit_with_picture(runs: "Sequence[RunPoint]", out: str) -> "FittedLaw":
    """Fit a scaling law to the sizes and losses of finished training runs, with a status line; draw the fit to the file
    `out` unless the name is ""."""
    from onward.planning.fitted import fit_runs
    from onward.reports.pictures.law_pictures import fit_picture

    with console.status(f"fitting {len(runs)} runs"):
        law = fit_runs(runs)
    if out:
        fit_picture(law.loss, runs, law.parabolas, law.frontier).write(Path(out))
    return law


def show_fit(result: dict[str, Any], out: str) -> None:
    """Print the fit of a scaling law from the JSON object `result`: the constants of the law with their intervals, the
    fits to the best run of each budget, the forecast and the warnings; then print the picture's file name `out` unless
    it is ""."""
    law, intervals = result["law"], result["intervals"]
    law = {**law, "a": law["beta"] / (law["alpha"] + law["beta"])}
    shown = lambda value: f"{value if value > 1e-9 else 0:.4g}"  # the fit in log space cannot reach 0
    print_table([{"": name, "fit": shown(law[name]), "95 %": " to ".join(map(shown, intervals[name]))} for name in law])
    console.print("\nL(N, D) = E + A / N^alpha + B / D^beta; the best size grows as C^a", soft_wrap=True)
    if exponent := result["exponent_of_parabolas"]:
        console.print(f"by a parabola for each budget, the best size grows as C^{exponent:.3f}", soft_wrap=True)
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
