"""A decoder that learns to write, character by character.

One layer of width 256 reads 128 characters and predicts the next, on real text: by default the documentation that
comes with Python. The loss starts near ln V, falls below what the frequencies of single characters can give, and
the samples, which start from an empty context, go from noise to the shapes of words.
"""

import argparse
import math

import numpy as np
import torch

import onward
from onward.data.sources import documents
from onward.data.tokens import Tokens, encode
from onward.data.windows import ValidationWindows, Windows
from onward.text.tokenizer import train_tokenizer
from onward.training.loss import mean_loss
from onward.training.trainer import StepPlan, Trainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="*", default=["embedded"], help="text files (default: Python's documentation)")
parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
parser.add_argument("--seed", type=int, default=0, help="of weights, windows and samples (default: 0)")
options = parser.parse_args()
torch.manual_seed(options.seed)

T, BATCH = 128, 16  # characters in a window, windows in a step
try:
    texts = list(documents(options.source))
    tokenizer = train_tokenizer("char", texts)
    tokens, _ = encode(tokenizer, texts)
    split = int(0.9 * len(tokens))
    windows = Windows([Tokens.of(tokens[:split])], T, options.seed)
    held_out = ValidationWindows(Tokens.of(tokens[split:]), T)
except onward.UserError as error:
    parser.error(str(error))

V = tokenizer.vocab_size
model = onward.Decoder(
    onward.DecoderConfig(
        vocab_size=V,
        d_model=256,
        n_layers=1,
        n_heads=4,
        context_length=T,
        position=onward.Learned(),
        attention=onward.SelfAttention(out_bias=True),
        mlp=onward.Plain("relu", bias=True),
        norm=onward.LayerNorm(),
        head_bias=True,
        dropout=0.2,
    )
)
print(f"{len(tokens):,} characters, {V} different ones; {sum(p.numel() for p in model.parameters()):,} parameters")


def samples() -> list[str]:
    """Three texts that begin with nothing."""
    model.eval()
    return onward.LanguageModel(model, tokenizer).generate([""] * 3, 120, temperature=1.0, seed=options.seed)


print("Untrained, it writes:")
for text in samples():
    print(f"  {text!r}")


# each step takes the next windows (B, T) and their targets: at each place the character after it
plans = (StepPlan([windows.read(range(step * BATCH, (step + 1) * BATCH))]) for step in range(options.steps))
trainer = Trainer(model, [torch.optim.AdamW(model.parameters())], lambda step: 3e-4)
print(f"\nA guess among {V} characters has loss ln {V} = {math.log(V):.3f}.")
for step in trainer.train(plans):
    if step.step % 50 == 1 or step.step == options.steps:
        print(f"step {step.step:4}  loss {step.loss:.3f}  {step.tokens / step.seconds:7,.0f} characters/s", flush=True)

counts = np.bincount(tokens[:split], minlength=V) / split
entropy = -float((counts[counts > 0] * np.log(counts[counts > 0])).sum())
loss, targets = mean_loss(model, held_out.batches(64))
print(f"validation  loss {loss:.3f} over {targets:,} characters it has not seen")
print(f"(The frequencies of single characters alone give {entropy:.3f}.)")

print("\nNow it writes:")
for text in samples():
    print(f"  {text!r}")
