"""The cost of doubling the context.

The products with weights are the same for every token; attention grows with the number of earlier tokens. A text of
twice the length therefore takes a little more than twice the operations while the weights dominate, and nearly four
times once attention does. The cache doubles. --out writes the curves as a picture (.svg, .png, .html).
"""

import argparse
from pathlib import Path

import torch

from onward.families import preset
from onward.planning import cache_bytes, causal_attention_flops, weight_flops
from onward.reports import Picture, curves

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="llama-3.1-8b", help="a published release (default: llama-3.1-8b)")
parser.add_argument("--out", default="", help="file of the picture (default: the terminal)")
options = parser.parse_args()

config = preset(options.model).config
contexts = [2**power for power in range(9, 21)]
weights, attention = weight_flops(config), [causal_attention_flops(config, length) for length in contexts]
texts = [length * (weights + one) for length, one in zip(contexts, attention)]
print("  context   TFLOP of a text   of the half   attention's share   GB of cache")
for i, length in enumerate(contexts):
    before = f"{texts[i] / texts[i - 1]:12.2f}x" if i else " " * 13
    share, cache = attention[i] / (weights + attention[i]), cache_bytes(config, 1, length, torch.bfloat16)
    print(f"{length:9,}{texts[i] / 1e12:16,.1f} {before}{share:18.1%}{cache / 1e9:15.2f}")
even = next((length for length, one in zip(contexts, attention) if one >= weights), 0)
print(f"From {even:,} tokens on attention takes more operations than all weights." if even else "Weights dominate.")

picture = Picture(
    f"Doubling the context of {options.model}",
    "Operations of the forward pass for one token, the mean over a text: those of the weights do not change, those of "
    "attention double with the context.",
    [
        curves(
            "billion operations for one token",
            [*range(9, 21)],
            {"weights": [weights / 1e9] * len(contexts), "attention": [one / 1e9 for one in attention]},
            x_name="tokens of context, as a power of two",
            log=True,
        ),
    ],
)
if options.out:
    picture.write(Path(options.out))
else:
    print(f"\n{picture.text()}")
