"""The memory for gradients and optimizer state in LoRA, DoRA and QLoRA, compared with training all weights.

    python -m benchmarks.lora [--rank 16]

A decoder of about 30 M parameters (8 layers, width 384, 6 heads, vocabulary 16,000, random weights, fp32) makes one
step of AdamW on one window. The table lists the bytes of all gradients at the step and of the optimizer state after it;
the last column lists the bytes of the weights themselves, which int8 and int4 reduce.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

import onward
from onward import Batch
from onward.training import CrossEntropy, optimizers
from onward.transforms import quantize_model

CONFIG = onward.DecoderConfig(vocab_size=16_000, d_model=384, n_layers=8, n_heads=6, d_ff=1536, context_length=64)


def memory(model: onward.Decoder, tokens: torch.Tensor) -> tuple[int, int]:
    """The bytes of gradients and optimizer state of a step, and the bytes of the weights."""
    made = optimizers(model, "adamw", 1e-3, 0.0, (0.9, 0.99))
    loss, _ = CrossEntropy()(model, Batch(tokens[:, :-1], tokens[:, 1:]))
    loss.backward()
    trained = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    for optimizer in made:
        optimizer.step()
        state = (value for kept in optimizer.state.values() for value in kept.values())
        trained += sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    return trained, sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def main(argv: list[str] | None = None, config: onward.DecoderConfig = CONFIG) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (default: 16)")
    rank = parser.parse_args(argv).rank
    tokens = torch.randint(config.vocab_size, (1, config.context_length))
    full: Callable[[nn.Module], object] = lambda model: None
    ways = {
        "all weights": (full, None),
        f"LoRA, rank {rank}": (full, onward.LoRA(rank)),
        f"DoRA, rank {rank}": (full, onward.LoRA(rank, dora=True)),
        f"LoRA, rank {rank}, on int8": (lambda model: quantize_model(model, "int8"), onward.LoRA(rank)),
        f"LoRA, rank {rank}, on int4": (lambda model: quantize_model(model, "int4"), onward.LoRA(rank)),
    }
    plain = 0
    print(f"{'':24}{'gradients and optimizer':>28}{'ratio':>8}{'weights':>12}")
    for name, (prepare, lora) in ways.items():
        torch.manual_seed(0)
        model = onward.Decoder(config)
        prepare(model)
        if lora is not None:
            onward.add_lora(model, lora)
        trained, weights = memory(model, tokens)
        plain = plain or trained
        print(f"{name:24}{trained / 1e6:25.1f} MB{trained / plain:8.1%}{weights / 1e6:9.1f} MB")


if __name__ == "__main__":
    main()
