"""Chinchilla's table: the optimal training run for each model size, by the three approaches of Hoffmann et al. and the
re-fit of 2024.

The columns are operations and tokens. Approaches 1 and 2 agree on about 20 tokens per parameter; the third recommended
many more at large sizes, until its fit was repeated (Besiroglu et al. 2024). --out draws sizes and tokens by the number
of operations (.svg, .png, .html).
"""

import argparse
from pathlib import Path

import numpy as np

from onward.planning import LAWS, flops_for
from onward.reports import Picture, curves

SIZES = 400e6, 1e9, 10e9, 67e9, 175e9, 280e9, 520e9, 1e12, 10e12  # of table 3 and table A3

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", default="", help="file of the picture (default: the terminal)")
options = parser.parse_args()

laws = [law for law in LAWS if law.name != "Kaplan"]
print(f"{'parameters':>10}" + "".join(f"{law.name:>24}" for law in laws))
for size in SIZES:
    budgets = [flops_for(law, parameters=size) for law in laws]
    cells = [f"{flops:.2e} {law.optimum(flops)[1] / 1e9:8,.1f} B" for law, flops in zip(laws, budgets)]
    print(f"{size / 1e9:8,.1f} B" + "".join(f"{cell:>24}" for cell in cells))

powers = np.linspace(18, 26, 50)
best = {law.name: np.array([law.optimum(10**power) for power in powers]) for law in LAWS}
x_name = "operations, as a power of ten"
picture = Picture(
    "The best size and the best number of tokens",
    "For each compute budget C = 6 N D. Where a line of the third chart is level, data grow as fast as the model.",
    [
        curves(name, powers.tolist(), {law: values(found) for law, found in best.items()}, x_name=x_name, log=True)
        for name, values in {
            "parameters": lambda found: found[:, 0],
            "tokens": lambda found: found[:, 1],
            "tokens for each parameter": lambda found: found[:, 1] / found[:, 0],
        }.items()
    ],
)
if options.out:
    picture.write(Path(options.out))
else:
    print(f"\n{picture.text()}")
