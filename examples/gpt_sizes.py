"""Where the parameters are: GPT, GPT-2 and GPT-3, part by part.

In the first GPT, the embedding table has a quarter of all parameters. The table grows in proportion to the width, and
the layers in proportion to its square: in GPT-3, the table has a third of a percent of the parameters, and the
feed-forward layers have two thirds. By the rule of thumb, the layers have 12 x layers x d_model squared parameters.
--out writes the shares as a picture (.svg, .png, .html).
"""

import argparse
from pathlib import Path

from onward.families import presets
from onward.planning import part_sizes
from onward.reports import Picture, bars

MODELS = "gpt", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-175b"
PARTS = "embedding", "positions", "attention", "feed-forward", "norms"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", default="", help="file of the picture (default: the terminal)")
options = parser.parse_args()

panels = []
print(f"{'model':12}" + "".join(f"{part:>17}" for part in PARTS) + f"{'all':>17}{'12 L D^2':>17}")
for name in MODELS:
    config = presets()[name].config
    sizes = {part.name: part.parameters for part in part_sizes(config) if part.parameters}
    total, rule = sum(sizes.values()), 12 * config.n_layers * config.d_model**2
    print(f"{name:12}" + "".join(f"{sizes[part]:17,}" for part in PARTS) + f"{total:17,}{rule:17,}")
    panels.append(bars(f"{name}: {total:,}", {part: round(100 * n / total, 1) for part, n in sizes.items()}, unit=" %"))

picture = Picture(
    "Where the parameters are", "The parameters of each part of GPT, GPT-2 and GPT-3, in percent of all.", panels
)
if options.out:
    picture.write(Path(options.out))
else:
    print(f"\n{picture.text()}")
