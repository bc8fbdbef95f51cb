"""The time and arithmetic that the KV cache saves, by length.

A decoder generates a token after texts of growing length, first by reading the whole text again, then with the keys and
values of the text in a cache. Both give the same logits. Without a cache, the arithmetic grows with the length; with a
cache, only the new token's attention grows. The counts agree with the formulas of `onward plan`. --out writes the
curves as a picture (.svg, .png, .html).
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import onward
from onward.planning import flops_per_token, part_sizes
from onward.reports import Picture, curves

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--length", type=int, default=512, help="the longest text, in tokens (default: 512)")
parser.add_argument("--rounds", type=int, default=5, help="timed calls; the fastest counts (default: 5)")
parser.add_argument("--out", default="", help="file of the picture (default: the terminal)")
options = parser.parse_args()
torch.manual_seed(0)
torch.set_grad_enabled(False)

config = onward.DecoderConfig(1000, d_model=256, n_layers=4, n_heads=8, n_kv_heads=2, context_length=options.length)
model = onward.Decoder(config).eval()
text = torch.randint(config.vocab_size, (1, options.length))
lengths = [*range(options.length // 8, options.length + 1, options.length // 8)]


def attention_flops(q: torch.Size, k: torch.Size, *_: object, **__: object) -> int:
    """The number of multiplications and additions in q kᵀ and in the weights times v, from the shapes (B, H, T, E) and
    (B, H, S, E)."""
    return 4 * q.numel() * k[2]


# PyTorch's FLOP counter does not support the CPU's attention kernel
ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}


def measured(run: Callable[[], Tensor]) -> tuple[Tensor, float, float]:
    """The logits of the last position, the millions of multiplications and additions of a call, and the milliseconds of
    the fastest call."""
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        logits = run()
    times = []
    for _ in range(options.rounds):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return logits[0, -1], counter.get_total_flops() / 1e6, min(times) * 1e3


def read_again(length: int) -> Tensor:
    """The logits (1, 1, V) after the first `length` tokens of the text, computed from all of these tokens."""
    return model.logits(model.hidden(text[:, :length])[:, -1:])


def continued(length: int) -> Tensor:
    """The logits (1, 1, V) after the first `length` tokens, computed from the last of them and the cache."""
    return model(text[:, length - 1 : length], torch.tensor([[length - 1]]), cache.view(length=length))


head = next(part.flops for part in part_sizes(config) if part.name == "head")


def formula(length: int, cached: bool) -> float:
    """Millions of operations: the blocks for the last token if `cached`, otherwise for all tokens, and the head for the
    last token. Each query is counted with `length` keys, because the kernel also computes masked scores."""
    one = flops_per_token(config, length) - head
    return ((one if cached else length * one) + head) / 1e6


cache = onward.KVCache(config, rows=1, length=options.length, chunk=options.length)
model(text[:, :-1], torch.arange(options.length - 1)[None], cache)  # keys and values of all tokens but the last
mflops: dict[str, list[float]] = {"without a cache": [], "with a cache": []}
times: dict[str, list[float]] = {"without a cache": [], "with a cache": []}
difference = 0.0
print("length   without a cache        with a cache")
for length in lengths:
    whole, *spent = measured(partial(read_again, length))
    step, *saved = measured(partial(continued, length))
    for name, (flops, milliseconds) in zip(mflops, (spent, saved)):
        mflops[name].append(flops)
        times[name].append(milliseconds)
    difference = max(difference, float((whole - step).abs().max()))
    print(f"{length:6}  {spent[0]:9,.1f} MFLOP {spent[1]:6.2f} ms  {saved[0]:6,.1f} MFLOP {saved[1]:6.2f} ms")
misses = (
    abs(formula(length, name == "with a cache") / found - 1)
    for name in mflops
    for length, found in zip(lengths, mflops[name])
)
print(f"The formulas differ from the counts by at most {max(misses):.1%}.")
print(f"The logits differ by {difference:.1e} at most.")
total = [sum(values) for values in mflops.values()]
print(f"Over these lengths the cache saves {1 - total[1] / total[0]:.1%} of the arithmetic.")

picture = Picture(
    "What the KV cache saves",
    "The arithmetic and the time of one more token after texts of increasing length. Without a cache, the whole text "
    "is read again for each token; with one, keys and values of the text are kept, and only the new token passes "
    "through the decoder.",
    [
        curves("million multiplications and additions", lengths, mflops, x_name="tokens of text", log=True),
        curves("milliseconds", lengths, times, x_name="tokens of text", log=True),
    ],
)
if options.out:
    picture.write(Path(options.out))
else:
    print(f"\n{picture.text()}")
