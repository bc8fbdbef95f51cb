"""Routing of tokens to experts.

A decoder with a mixture of 4 experts in each of 2 layers is trained on Python's documentation; every character uses one
expert. The cross-entropy alone teaches the routers to divide the work; an auxiliary loss only keeps all experts in use.
The table shows the distribution of each kind of character over the experts. --out draws it, with the experts of each
character of a sentence (.svg, .png, .html).
"""

import argparse
from pathlib import Path

import torch

import onward
from onward import StepPlan, Tokens, Trainer, Windows, train_tokenizer
from onward.data import documents, encode
from onward.inspection import router_load
from onward.reports import ColorScale, Picture, Reading, cells
from onward.reports import experts as experts_of_tokens
from onward.training import Balance

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
parser.add_argument("--seed", type=int, default=0, help="seed of weights and windows (default: 0)")
parser.add_argument("--out", default="", help="file of the picture (default: the terminal)")
options = parser.parse_args()
torch.manual_seed(options.seed)

T, BATCH, EXPERTS = 64, 16, 4  # characters per window, windows per step, experts per layer
KINDS = {"vowel": "aeiou", "digit": "0123456789", "space": " ", "line break": "\n"}
tokenizer = train_tokenizer("char", texts := list(documents(["embedded"])))
tokens, _ = encode(tokenizer, texts)
windows = Windows([Tokens.of(tokens)], T, options.seed)
config = onward.DecoderConfig(
    tokenizer.vocab_size,
    d_model=64,
    n_layers=2,
    n_heads=4,
    context_length=T,
    mlp=onward.Experts(EXPERTS, top_k=1, d_ff=64),
)
model = onward.Decoder(config)

# the auxiliary loss keeps all experts in use: without it, one of them soon takes every character
plans = (StepPlan([windows.read(range(step * BATCH, (step + 1) * BATCH))]) for step in range(options.steps))
for step in Trainer(
    model, [torch.optim.AdamW(model.parameters())], lambda step: 3e-3, balance=Balance(model, 0.01, 0)
).train(plans):
    if step.step in (1, options.steps):
        print(f"step {step.step:4}  loss {step.loss:.3f}")


def kind(token: int) -> str:
    """Return the kind of a character by its id."""
    piece = tokenizer.piece(token)
    given = next((name for name, characters in KINDS.items() if piece and piece in characters), "")
    return given or ("consonant" if piece.islower() else "capital" if piece.isupper() else "other")


model.eval()
held = tokens[-32 * T :].reshape(-1, T).tolist()
load = router_load(model, held, kind)
for layer, shares in zip(load.layers, load.shares.tolist()):
    print(f"\nlayer {layer}     " + "".join(f"  expert {expert}" for expert in range(EXPERTS)))
    for name, row in zip(load.kinds, shares):
        print(f"  {name:10}" + "".join(f"{share:10.0%}" for share in row))
names = [f"expert {expert}" for expert in range(EXPERTS)]
reading = "{row} characters go to {column} with {value}"
scale = ColorScale(1, unit="share")
kinds = [
    cells(f"layer {layer}: kinds of characters", shares, load.kinds, names, scale=scale, reading=reading)
    for layer, shares in zip(load.layers, load.shares.numpy())
]
of_text = experts_of_tokens(Reading(model, tokenizer, "Return the value of a key, or 0."))
picture = Picture(
    "Which token goes to which expert",
    "Above, the fraction of each kind of character that each expert gets. Below, the expert of each character of a "
    "sentence, with its routing weight. Nobody told the routers which character belongs where; an "
    "auxiliary loss only keeps all experts in use.",
    [*kinds, *of_text.panels],
)
if options.out:
    picture.write(Path(options.out))
else:
    print(f"\n{picture.text()}")
