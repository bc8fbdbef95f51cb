"""Training on the CPU: Onward's loop compared with a plain fp32 loop, on the same weights and batches.

    python -m benchmarks.train_cpu                  speed, then 200 steps of each
    python -m benchmarks.train_cpu --steps 0        speed only
    python -m benchmarks.train_cpu --compile        with compiled blocks

The model has GPT-2's architecture: width 384, 6 layers, 6 heads, context 256, batch 12, characters. The loops are timed
alternately; the best and the median of each are compared. The limit is the time that the matrix products of a step
alone would take: their floating-point operations divided by the FLOP/s of a large product in the same precision.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional as F

import onward
from benchmarks.plain import PlainGPT
from benchmarks.text import machine, shakespeare
from onward import Batch, StepConfig, StepPlan, Tokens, Trainer, ValidationWindows, Windows, train_tokenizer
from onward.data import IGNORE_INDEX, encode
from onward.training import optimizers

BATCH, CONTEXT, WIDTH, LAYERS, HEADS, RATE = 12, 256, 384, 6, 6, 1e-3


def decoder(vocab: int) -> onward.Decoder:
    config = onward.DecoderConfig(
        vocab_size=vocab,
        d_model=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        context_length=CONTEXT,
        position=onward.Learned(),
        attention=onward.SelfAttention(bias=True, out_bias=True),
        mlp=onward.Plain(bias=True),
        norm=onward.LayerNorm(),
        tied=True,
    )
    return onward.Decoder(config)


def batches(windows: Windows) -> Iterator[Batch]:
    return (windows.read(range(first, first + BATCH)) for first in itertools.count(0, BATCH))


def plain_loop(model: PlainGPT, windows: Windows) -> Iterator[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.1)
    for batch in batches(windows):
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def our_loop(model: onward.Decoder, windows: Windows) -> Iterator[float]:
    adamw = optimizers(model, "adamw", RATE, 0.1, (0.9, 0.99))
    trainer = Trainer(model, adamw, lambda step: RATE, StepConfig(clip=1.0, precision="bf16"))
    return (step.loss for step in trainer.train(StepPlan([batch]) for batch in batches(windows)))


@torch.no_grad()
def held_loss(model: nn.Module, windows: ValidationWindows) -> float:
    """The mean validation loss, in fp32."""
    total, count = 0.0, 0
    for batch in windows.batches(BATCH):
        logits, targets = model(batch.tokens).flatten(0, 1), batch.targets.flatten()
        total += F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum").item()
        count += batch.num_targets
    return total / count


def rate(dtype: torch.dtype) -> float:
    """FLOP/s of the model's largest matrix product in a dtype."""
    x, w = torch.randn(BATCH * CONTEXT, WIDTH, dtype=dtype), torch.randn(4 * WIDTH, WIDTH, dtype=dtype)
    times = []
    for _ in range(20):
        start = perf_counter()
        F.linear(x, w)
        times.append(perf_counter() - start)
    return 2 * x.numel() * 4 * WIDTH / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each loop before their losses are compared")
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each loop")
    parser.add_argument("--compile", action="store_true", help="compile Onward's blocks")
    options = parser.parse_args()
    texts = shakespeare()
    tokenizer = train_tokenizer("char", texts)
    tokens = Tokens.of(*encode(tokenizer, texts))
    border = int(0.9 * len(tokens))
    windows = Windows([tokens.part(0, border)], CONTEXT, seed=0)
    torch.manual_seed(0)
    ours, plain = decoder(tokenizer.vocab_size), PlainGPT(tokenizer.vocab_size, WIDTH, LAYERS, HEADS, CONTEXT)
    plain.copy(ours.state_dict())
    if options.compile:
        for block in ours.blocks:
            block.compile()
    loops = {"plain fp32": plain_loop(plain, windows), "onward bf16": our_loop(ours, windows)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(options.rounds + 2):
        for name, loop in loops.items():
            start = perf_counter()
            next(loop)
            times[name].append(perf_counter() - start)
    parameters = sum(p.numel() for p in ours.parameters())
    attention = 12 * LAYERS * WIDTH * CONTEXT  # per token; masked scores are counted
    flop = BATCH * CONTEXT * (6 * (parameters - CONTEXT * WIDTH) + attention)
    limits = {"plain fp32": flop / rate(torch.float32), "onward bf16": flop / rate(torch.bfloat16)}

    print(machine())
    print(f"{parameters:,} parameters, {flop / 1e9:.0f} GFLOP a step\n")
    print(f"{'':14}{'best':>9}{'median':>9}{'limit':>24}{'of the limit':>14}")
    for name, taken in times.items():
        best, middle = min(taken[2:]), statistics.median(taken[2:])
        limit = limits[name]
        print(f"{name:14}{best * 1e3:7.0f}ms{middle * 1e3:7.0f}ms{limit * 1e3:22.0f}ms{limit / best:13.0%}")
    ratio: Callable[[Callable[[list[float]], float]], float] = lambda f: (
        f(times["plain fp32"][2:]) / f(times["onward bf16"][2:])
    )
    print(f"\nsteps per second, onward / plain: {ratio(min):.2f} (best), {ratio(statistics.median):.2f} (median)")
    print(f"ratio of the limits:              {limits['plain fp32'] / limits['onward bf16']:.2f}")
    if options.steps:
        for name, loop in loops.items():
            for _ in range(options.steps - len(times[name])):
                next(loop)
        held = ValidationWindows(tokens.part(border, len(tokens)), CONTEXT)
        losses = {"plain fp32": held_loss(plain, held), "onward bf16": held_loss(ours, held)}
        print(f"\nvalidation loss after {options.steps} steps: " + ", ".join(f"{n} {x:.4f}" for n, x in losses.items()))
        print(f"difference {abs(losses['plain fp32'] - losses['onward bf16']):.4f}")


if __name__ == "__main__":
    main()
