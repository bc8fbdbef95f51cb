"""The parts of a Llama block, and the effect of each.

A block with RMSNorm, SwiGLU of hidden size int(8/3 d), rotary positions and no biases. Three experiments with hooks:
RMSNorm scales a vector but, unlike LayerNorm, does not center it; the score of a rotated query and key depends on
their distance and not on their positions; and the model computes finite values beyond the training length.
"""

import argparse

import torch

import onward
from onward.model import build_norm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="seed of the weights and vectors (default: 0)")
torch.manual_seed(parser.parse_args().seed)

D, TRAINED = 64, 32  # width, training length
config = onward.DecoderConfig(
    vocab_size=256,
    d_model=D,
    n_layers=1,
    n_heads=4,
    d_ff=int(8 / 3 * D),  # three matrices of 8/3 d have as many parameters as two of 4 d
    context_length=TRAINED,
    position=onward.Rotary(),
    attention=onward.SelfAttention(),
    mlp=onward.Gated("silu"),
    norm=onward.RMSNorm(),
    block=onward.PreNorm(),
)
model = onward.Decoder(config).eval()
torch.set_grad_enabled(False)

print("The block, part by part (no biases):")
for name, parameter in model.get_submodule("blocks.0").named_parameters():
    print(f"  {name:18} {tuple(parameter.shape)}")

print("\n1. RMSNorm divides by the root mean square. It does not center.")
with onward.trace(model, "blocks.0.in", "blocks.0.attn_norm") as seen:
    model(3 + torch.randn(1, TRAINED, D))
before, after = seen["blocks.0.in"], seen["blocks.0.attn_norm"]
layer_norm = build_norm(onward.LayerNorm(), config)
for name, x in ("before", before), ("RMSNorm", after), ("LayerNorm", layer_norm(before)):
    print(f"  {name:10} mean {x.mean():7.4f}   root mean square {x.square().mean(-1).sqrt().mean():7.4f}")

print("\n2. Rotary positions: the score of a query and a key depends only on their distance.")
print("  All positions have the same vector, so scores differ only because of their positions.")
with onward.trace(model, "blocks.0.attn.scores") as seen:
    model(torch.randn(D).expand(1, TRAINED, D))
scores = seen["blocks.0.attn.scores"][0, 0]  # computed from rotated queries and keys
for distance in 0, 1, 2, 4, 8, 16:
    pairs = scores.diagonal(-distance)
    apart = pairs.max() - pairs.min()
    print(f"  distance {distance:2}: score {pairs.mean():8.5f}, the same for {len(pairs)} pairs up to {apart:.1e}")

print("\n3. Beyond the training length.")
tokens = torch.randint(config.vocab_size, (1, 8 * TRAINED))
with onward.trace(model, "blocks.0.attn.weights") as seen:
    logits = model(tokens)
weights = seen["blocks.0.attn.weights"]
print(f"  {tokens.size(1)} tokens into a model for {TRAINED}: attention {tuple(weights.shape)}")
print(f"  finite attention: {weights.isfinite().all()}, finite logits: {logits.isfinite().all()}")
print(f"  rows sum to 1 up to {(weights.sum(-1) - 1).abs().max():.1e}")
print(
    "  A table of learned positions would have no row there. Finite values are not yet good predictions: for distances"
)
print("  that it has not been trained on, a model needs further training or a larger rotary base.")
