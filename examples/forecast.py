"""A forecast from small runs: size, tokens and loss of a training run ten times larger than the largest.

The table has the best model of each of four budgets, from the logbook of nanochat (Karpathy 2025, dev/LOG.md): each is
the best of several sizes trained with the same number of operations. Size and tokens grow, and the loss falls, as
powers of the number of operations. To test the forecast, the last run is also forecast from the first three. --out
draws the runs and the curves (.svg, .png, .html).
"""

import argparse
from pathlib import Path

import numpy as np

from onward.planning import fit_power
from onward.reports import Picture, curves

RUNS = [  # operations, parameters, tokens, bits per byte on validation text
    (1.00e18, 110.7e6, 1.240e9, 0.8972),
    (2.15e18, 167.8e6, 1.785e9, 0.8616),
    (4.64e18, 250.7e6, 2.640e9, 0.8293),
    (1.00e19, 381.8e6, 3.810e9, 0.7999),
]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--flops", type=float, default=1e20, help="operations to forecast (default: 1e20)")
parser.add_argument("--out", default="", help="file of the picture (default: the terminal)")
options = parser.parse_args()

flops, sizes, tokens, losses = np.array(RUNS).T


def power(x: np.ndarray, y: np.ndarray) -> np.poly1d:
    """Fit a straight line through logarithms: y = e^b x^a."""
    return np.poly1d(np.polyfit(np.log(x), np.log(y), 1))


lines = {name: power(flops, values) for name, values in (("parameters", sizes), ("tokens", tokens))}
for name, line in lines.items():
    print(f"{name:10} grow as C^{line[1]:.3f}: {np.exp(line(np.log(options.flops))):.3g} for {options.flops:.0e}")
law = fit_power(flops.tolist(), losses.tolist())
print(f"loss = {law.scale:.3g} C^-{law.exponent:.3f} + {law.floor:.3f}: {law.loss(options.flops):.4f} bits per byte")
plain = power(flops, losses)
print(f"without a floor: {np.exp(plain(np.log(options.flops))):.4f}, so the form of the law decides far from the runs")
forecast = float(np.exp(power(flops[:3], losses[:3])(np.log(flops[3]))))
print(
    f"the last run from the first three: {forecast:.4f}, trained {losses[3]:.4f}, off by {forecast / losses[3] - 1:.1%}"
)

budgets = np.geomspace(flops[0], max(options.flops, flops[-1]), 40)
near = [int(np.argmin(np.abs(np.log(budgets / one)))) for one in flops]
points = np.full(len(budgets), np.nan)
points[near] = losses
picture = Picture(
    "A forecast from small runs",
    "Two power laws through the best runs of four budgets: one with a floor, and one without. They agree near the "
    "runs, and diverge to the right of the mark.",
    [
        curves(
            "bits per byte",
            np.log10(budgets).tolist(),
            {
                "runs": points,
                "power and floor": [law.loss(one) for one in budgets],
                "power": np.exp(plain(np.log(budgets))),
            },
            x_name="operations, as a power of ten",
            marks={"largest run": float(np.log10(flops[-1]))},
        ),
    ],
)
if options.out:
    picture.write(Path(options.out))
else:
    print(f"\n{picture.text()}")
