"""The memory of the KV cache by context length, from GPT-2 to DeepSeek-V3.

Each token stores a key and a value in every layer: 2 x layers x key/value heads x head size numbers. GPT-2 and the
first Llamas have as many key/value heads as query heads; in Llama 2 70B, eight query heads share one key/value head,
and in Llama 3 8B four (grouped-query attention). Mistral 7B keeps only the last 4,096 tokens. DeepSeek-V3 stores one
latent vector for all heads instead of keys and values. --out writes the curves as a picture (.svg, .png, .html).
"""

import argparse
from pathlib import Path

import torch

from onward.families import presets
from onward.planning import cache_bytes, cache_bytes_per_token, weight_bytes
from onward.reports import Picture, curves

MODELS = "gpt2", "gpt2-xl", "llama-7b", "llama-2-70b", "llama-3-8b", "mistral-7b", "deepseek-v3"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", default="", help="file of the picture (default: the terminal)")
options = parser.parse_args()

contexts = [2**power for power in range(7, 18)]
gigabytes: dict[str, list[float]] = {}
print("model         kB per token   GB at 1,024   at 8,192   at 131,072   of the weights")
for name in MODELS:
    config = presets()[name].config  # only sizes are computed, so a context may exceed the model's
    bytes_at = {length: cache_bytes(config, 1, length, torch.bfloat16) for length in contexts}
    gigabytes[name] = [count / 1e9 for count in bytes_at.values()]
    shown = "".join(f"{bytes_at[length] / 1e9:13.3f}" for length in (1024, 8192, 131072))
    share = bytes_at[131072] / weight_bytes(config, torch.bfloat16)
    print(f"{name:12}{cache_bytes_per_token(config) / 1e3:14.1f}{shown}{share:14.0%}")

picture = Picture(
    "The memory of the KV cache",
    "Keys and values of one text in bf16. A cache grows with the context; fewer key/value heads lower the line, a "
    "window bounds it, and a latent vector replaces the keys and values of all heads.",
    [curves("GB", [*range(7, 18)], gigabytes, x_name="tokens of context, as a power of two", log=True)],
)
if options.out:
    picture.write(Path(options.out))
else:
    print(f"\n{picture.text()}")
