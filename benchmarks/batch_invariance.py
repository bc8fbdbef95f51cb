"""How often a sampled token depends on the batch: draws from logits computed alone and in a batch of 8.

    python -m benchmarks.batch_invariance [--draws 100000] [--model FOLDER]

The same tokens are decoded in 8 rows of one cache and in one row each; every pair of logits is drawn from with many
seeds. Printed per vocabulary and precision: the largest difference of two logits, and how many of 100,000 draws
differ. The models have random weights (width 64, 2 layers), or are the one in FOLDER.
"""

import argparse

import torch

import onward
from onward.model.kernels.draws import draws

ROWS, STEPS = 8, 24
MODELS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@torch.inference_mode()
def logits(model: onward.Decoder, tokens: torch.Tensor, rows: int) -> torch.Tensor:
    """The logits (8, T, V) of tokens (8, T), decoded one by one in this many rows at a time."""
    found = []
    for first in range(0, ROWS, rows):
        cache = onward.KVCache(model.config, rows, STEPS, dtype=model.dtype)
        part = tokens[first : first + rows]
        steps = [model(part[:, [t]], torch.full((rows, 1), t), cache) for t in range(STEPS)]
        found.append(torch.cat(steps, 1))
    return torch.cat(found).float()


def differing(model: onward.Decoder, draws: int) -> tuple[float, float]:
    """The largest difference of two logits, and the differing ones of 100,000 draws."""
    tokens = torch.randint(model.config.vocab_size, (ROWS, STEPS), generator=torch.Generator().manual_seed(0))
    batch, alone = (logits(model, tokens, rows).flatten(0, 1) for rows in (ROWS, 1))
    index, times, differ = torch.arange(len(batch)), -(-draws // len(batch)), 0
    for seed in range(times):
        one, other = (drawn(z, torch.full_like(index, seed), index) for z in (batch, alone))
        differ += int((one != other).sum())
    return float((batch - alone).abs().max()), differ / (times * len(batch)) * 100_000


def drawn(z: torch.Tensor, seeds: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Tokens (N,) drawn from logits (N, V), as the engine draws them."""
    tokens, factors = torch.empty_like(index), torch.ones(len(z))
    addresses = (t.data_ptr() for t in (factors, seeds, index))
    draws("float32", False)(tokens.data_ptr(), z.data_ptr(), 0, *addresses, z.size(1), len(z), torch.get_num_threads())
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    print("| vocabulary | precision | largest difference of logits | draws that differ, of 100,000 |")
    print("| --- | --- | --- | --- |")
    for size in [0] if options.model else [23, 512, 50_257, 151_936]:
        for name, dtype in MODELS.items():
            if options.model:
                model = onward.load(options.model, dtype=dtype, device="cpu").model
            else:
                torch.manual_seed(0)
                model = onward.Decoder(onward.DecoderConfig(size, d_model=64, n_layers=2, n_heads=4)).to(dtype).eval()
                model.head.weight.data.mul_(20)  # logits as far apart as those of a trained model
            largest, rate = differing(model, options.draws)
            print(f"| {model.config.vocab_size:,} | {name} | {largest:.1e} | {rate:.1f} |", flush=True)


if __name__ == "__main__":
    main()
