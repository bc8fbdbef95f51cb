"""Compares rotary positions, ALiBi and other position encodings beyond the trained length.

Decoders that differ only in their positions are trained on windows of 32 characters and evaluated on windows four times
as long. Up to the trained length, rotary positions are at least as good as ALiBi. Beyond it, distances and angles occur
that no training window had, and the perplexity rises. ALiBi reduces the attention to distant tokens, and the perplexity
does not rise. With sinusoidal positions, the perplexity also rises, and a table of learned positions has no rows beyond
the trained length. The rotary decoder is evaluated again with its frequencies scaled by YaRN and the same weights.
--out writes the curves as a picture (.svg, .png, .html).
"""

import argparse
import copy
import math
from pathlib import Path

import numpy as np
import torch

import onward
from onward import Position, StepPlan, Tokens, Trainer, Windows, train_tokenizer
from onward.data import documents, encode
from onward.evaluation import logprobs
from onward.reports import Picture, curves
from onward.transforms import extended

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300, help="training steps of each decoder (default: 300)")
parser.add_argument("--seed", type=int, default=0, help="seed of weights and windows (default: 0)")
parser.add_argument("--out", default="", help="file of the picture (default: the terminal)")
options = parser.parse_args()

T, LONGER, BATCH, AVERAGED = 32, 4, 32, 8  # trained length, length ratio, windows per step, positions per point
tokenizer = train_tokenizer("char", texts := list(documents(["embedded"])))
tokens, _ = encode(tokenizer, texts)
split = int(0.9 * len(tokens))
windows = Windows([Tokens.of(tokens[:split])], T, options.seed)
held_out = tokens[split:].astype(np.int64)
long = held_out[: len(held_out) // (LONGER * T) * LONGER * T].reshape(-1, LONGER * T)[:256]


def trained(position: Position) -> onward.Decoder:
    """Return a decoder with these positions, trained on windows of T characters."""
    torch.manual_seed(options.seed)
    model = onward.Decoder(
        onward.DecoderConfig(
            tokenizer.vocab_size, d_model=64, n_layers=2, n_heads=4, context_length=T, position=position
        )
    )
    plans = (StepPlan([windows.read(range(step * BATCH, (step + 1) * BATCH))]) for step in range(options.steps))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in Trainer(model, [optimizer], lambda step: 3e-3 * (1 - step / (options.steps + 1))).train(plans):
        pass
    return model


places = [*range(AVERAGED, LONGER * T, AVERAGED)]
positions = {
    "rotary": onward.Rotary(),
    "ALiBi": onward.Alibi(),
    "sinusoidal": onward.Sinusoidal(),
    "learned": onward.Learned(),
}
models = {name: trained(position) for name, position in positions.items()}
models["rotary, yarn:4"] = copy.deepcopy(models["rotary"])  # the same weights
models["rotary, yarn:4"].config = extended(models["rotary"].config, f"yarn:{LONGER}")
perplexity = {}
for name, model in models.items():
    reach = T if name == "learned" else LONGER * T  # a table of learned positions has no rows beyond T
    losses = -logprobs(model, long[:, :reach]).mean(0)  # by position, from 1 on
    perplexity[name] = [math.exp(losses[p - AVERAGED : p].mean()) if p < reach else math.nan for p in places]
    print(
        f"{name:14} perplexity {math.exp(losses[T // 2 : T - 1].mean()):6.2f} at positions {T // 2} to {T - 1}", end=""
    )
    if reach > T:
        print(f", {math.exp(losses[2 * T :].mean()):6.2f} at positions {2 * T} to {LONGER * T - 1}")
    else:
        print(", the last of the table")

picture = Picture(
    "Beyond the trained length",
    f"Perplexity by position, each point over {AVERAGED} positions, of decoders trained on windows of {T} "
    f"characters and read over windows of {LONGER * T}. They differ in nothing but their positions.",
    [curves("perplexity", places, perplexity, x_name="position", marks={"trained length": T}, size=(640, 300))],
)
if options.out:
    picture.write(Path(options.out))
else:
    print(f"\n{picture.text()}")
