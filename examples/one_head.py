"""One attention head, small enough to read every number.

Six vectors of width 4 pass through a decoder with one layer and one head (post-norm, ReLU, no biases); the output is
logits over 20 tokens. The decoder gets the vectors in place of token ids, so no embedding is used. The printed
attention weights show the effect of the causal mask: no token attends to a later one. For biases as in some textbooks,
use `onward.Plain("relu", bias=True)` and `head_bias=True`.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

import onward

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="seed of the weights and vectors (default: 0)")
torch.manual_seed(parser.parse_args().seed)
torch.set_printoptions(precision=3, sci_mode=False, linewidth=120)

B, T, D, V = 1, 6, 4, 20
config = onward.DecoderConfig(
    vocab_size=V,
    d_model=D,
    n_layers=1,
    n_heads=1,
    d_ff=4 * D,
    context_length=T,
    position=onward.NoPosition(),
    attention=onward.SelfAttention(),
    mlp=onward.Plain("relu"),
    norm=onward.LayerNorm(),
    block=onward.PostNorm(),
    final_norm=onward.NoNorm(),  # a post-norm block already ends with a norm
)
model = onward.Decoder(config)

# Initial weights have a standard deviation of 0.02, which suits widths of hundreds. At width 4 all scores would be near
# 0 and attention uniform; with D ** -0.5, sums over D products have a standard deviation near 1.
for matrix in model.blocks.parameters():
    if matrix.ndim == 2:
        nn.init.normal_(matrix, std=D**-0.5)

vectors = torch.randn(B, T, D)
with onward.trace(model, "blocks.0.attn.*") as seen:
    logits = model(vectors)

print("Shapes: B batch, T tokens, H heads, E width of a head, D width of the model, V vocabulary")
print(f"  vectors in      (B, T, D)     {tuple(vectors.shape)}")
for name in ("q", "k", "v"):
    print(f"  {name}               (B, T, H, E)  {tuple(seen[f'blocks.0.attn.{name}'].shape)}")
print(f"  attention       (B, H, T, T)  {tuple(seen['blocks.0.attn.weights'].shape)}")
print(f"  head's output   (B, T, H, E)  {tuple(seen['blocks.0.attn.heads'].shape)}")
print(f"  logits out      (B, T, V)     {tuple(logits.shape)}")

weights = seen["blocks.0.attn.weights"][0, 0]
print("\nAttention weights: row t is how much token t attends to each token.")
print(weights)
print(f"Every row sums to 1 (largest error {(weights.sum(-1) - 1).abs().max():.1e}).")
print(f"Above the diagonal the largest weight is {weights.triu(1).max().item()}: no token attends to a later one.")

changed = vectors.clone()
changed[:, -1] = torch.randn(D)
moved = (model(changed) - logits).abs().amax((0, 2))
print(f"With another last vector, the largest change of the logits at each position:\n{moved.detach()}")

print(f"\nLogits of the last token:\n{logits[0, -1].detach()}")

targets = torch.randint(V, (B, T))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
print()
for when in ("Untrained", "After one step of AdamW"):
    loss = F.cross_entropy(model(vectors).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}
    print(f"{when}: loss {loss:.4f}, gradient norm at the query projection {norms['blocks.0.attn.q.weight']:.2e}")
    optimizer.step()
print(f"Untrained, the loss is near ln {V} = {math.log(V):.4f}, that of a uniform guess among {V} tokens. The gradient")
print("passes through head, norms, feed-forward and softmax to the query projection: all parts are trained.")
