"""A character-level decoder, trained on real text.

One layer of width 256 with a context of 128 characters, trained by default on the documentation that comes with
Python. The loss starts near ln V and falls below the entropy of the character frequencies. Samples, which start from an
empty context, change from noise to words.
"""

import argparse
import math

import numpy as np
import torch

import onward
from onward import StepPlan, Tokens, Trainer, ValidationWindows, Windows, mean_loss, train_tokenizer
from onward.data import documents, encode

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="*", default=["embedded"], help="text files (default: Python's documentation)")
parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
parser.add_argument("--seed", type=int, default=0, help="seed of weights, windows and samples (default: 0)")
options = parser.parse_args()
torch.manual_seed(options.seed)

T, BATCH = 128, 16  # characters per window, windows per step
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
    """Three texts sampled from an empty context."""
    model.eval()
    return onward.LanguageModel(model, tokenizer).generate([""] * 3, 120, temperature=1.0, seed=options.seed)


print("Untrained, it writes:")
for text in samples():
    print(f"  {text!r}")


# each step takes the next windows (B, T) and their targets, the character after each
plans = (StepPlan([windows.read(range(step * BATCH, (step + 1) * BATCH))]) for step in range(options.steps))
trainer = Trainer(model, [torch.optim.AdamW(model.parameters())], lambda step: 3e-4)
print(f"\nA uniform guess among {V} characters has loss ln {V} = {math.log(V):.3f}.")
for step in trainer.train(plans):
    if step.step % 50 == 1 or step.step == options.steps:
        print(f"step {step.step:4}  loss {step.loss:.3f}  {step.tokens / step.seconds:7,.0f} characters/s", flush=True)

counts = np.bincount(tokens[:split], minlength=V) / split
entropy = -float((counts[counts > 0] * np.log(counts[counts > 0])).sum())
loss, targets = mean_loss(model, held_out.batches(64))
print(f"validation  loss {loss:.3f} over {targets:,} characters that were not trained on")
print(f"(The entropy of the character frequencies is {entropy:.3f}.)")

print("\nNow it writes:")
for text in samples():
    print(f"  {text!r}")
