"""A small GPT, and how many parameters each part has.

GPT-2's architecture and vocabulary (50,257) in a small size: context 256, 6 layers, 6 heads, width 384, GELU, and a
head tied to the embedding, so the vocabulary counts once. Prints the parameters of each part, then takes a few
steps on real text, by default the documentation that comes with Python.
"""

import argparse
import math
from collections import Counter

import torch

import onward
from onward import StepConfig, StepPlan, Tokens, Trainer, Windows, train_tokenizer
from onward.data import documents, encode

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="*", default=["embedded"], help="text files (default: Python's documentation)")
parser.add_argument("--steps", type=int, default=6, help="training steps (default: 6)")
parser.add_argument("--seed", type=int, default=0, help="seed of weights and windows (default: 0)")
options = parser.parse_args()
torch.manual_seed(options.seed)

V, T, BATCH = 50_257, 256, 2  # vocabulary, tokens per window, windows per step
model = onward.Decoder(
    onward.DecoderConfig(
        vocab_size=V,
        d_model=384,
        n_layers=6,
        n_heads=6,
        context_length=T,
        position=onward.Learned(),
        attention=onward.SelfAttention(bias=True, out_bias=True),
        mlp=onward.Plain("gelu", bias=True),
        norm=onward.LayerNorm(),
        tied=True,
    )
)

print("Parameters, part by part:")
parts: Counter[str] = Counter()
for name, parameter in model.named_parameters():
    where = name.split(".")
    part = f"6 x {where[2]}" if where[0] == "blocks" else where[0]  # blocks.3.attn.q.weight belongs to attn
    parts[part] += parameter.numel()
for part, count in parts.items():
    print(f"  {part:14} {count:10,}")
print(f"  {'head':14} {0:10,}  (tied to the embedding)")
print(f"  {'total':14} {parts.total():10,}\n")

try:
    texts = list(documents(options.source))
    tokenizer = train_tokenizer(f"bpe:{V}", texts)
    tokens, _ = encode(tokenizer, texts)
    windows = Windows([Tokens.of(tokens)], T, options.seed)
except onward.UserError as error:
    parser.error(str(error))
print(f"The text is {len(tokens):,} tokens with {tokenizer.vocab_size:,} different ids; the other ids are unused.")
print(f"A uniform guess among {V:,} tokens has loss ln {V:,} = {math.log(V):.3f}.")


# each step takes the next windows; the target of a token is the one after it
plans = (StepPlan([windows.read(range(step * BATCH, (step + 1) * BATCH))]) for step in range(options.steps))
trainer = Trainer(model, [torch.optim.AdamW(model.parameters())], lambda step: 1e-3, StepConfig(clip=1.0))
for step in trainer.train(plans):
    print(
        f"step {step.step}  loss {step.loss:.3f}  gradient norm {step.grad_norm:.2f}, clipped to "
        f"{min(step.grad_norm, 1.0):.2f}  {step.tokens / step.seconds:,.0f} tokens/s",
        flush=True,
    )
