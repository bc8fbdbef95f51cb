"""The cost of inspection: tracing, lens, head scores and attribution patching, relative to plain forward passes.

    python -m benchmarks.inspect [--rounds 5]

The decoder has 12 layers and width 768 (12 heads, gated feed-forward of 2,048, vocabulary 32,000, random weights,
fp32). Each call is timed alternately with a plain forward pass over the same tokens (for the roles of heads: over 128
tokens); the best of the rounds is reported.
"""

import argparse
from collections.abc import Callable
from time import perf_counter

import torch

import onward
from onward.inspection import head_roles, logit_difference, logit_lens
from onward.inspection.patching import attribution_patching

CONFIG = onward.DecoderConfig(vocab_size=32_000, d_model=768, n_layers=12, n_heads=12, d_ff=2048, context_length=256)


def best(call: Callable[[], object], plain: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The seconds of a call and of a plain forward pass, each the best of alternating rounds."""
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for each, run in zip(seconds, (call, plain)):
            start = perf_counter()
            run()
            each.append(perf_counter() - start)
    return min(seconds[0]), min(seconds[1])


def main(argv: list[str] | None = None, config: onward.DecoderConfig = CONFIG) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the best is reported (default: 5)")
    rounds = parser.parse_args(argv).rounds
    torch.manual_seed(0)
    model = onward.Decoder(config).eval()
    tokens = torch.randint(config.vocab_size, (1, config.context_length))
    half = tokens[0, : config.context_length // 2].tolist()
    other = [*half[:-9], (half[-9] + 1) % config.vocab_size, *half[-8:]]
    metric = logit_difference(1, 2)

    @torch.no_grad()
    def forward(ids: torch.Tensor) -> torch.Tensor:
        return model(ids)

    def traced() -> None:
        with onward.trace(model):
            forward(tokens)

    row = torch.tensor([half])
    lines: dict[str, tuple[Callable[[], object], torch.Tensor]] = {
        f"trace of everything, {tokens.size(1)} tokens": (traced, tokens),
        f"logit lens, {len(half)} tokens": (lambda: logit_lens(model, half), row),
        "roles of all heads": (lambda: head_roles(model), row),
        f"attribution patching, {len(half)} tokens": (lambda: attribution_patching(model, half, other, metric), row),
    }
    forward(tokens)
    print(f"{'':42}{'seconds':>9}{'forwards':>10}")
    for name, (call, ids) in lines.items():
        seconds, plain = best(call, lambda ids=ids: forward(ids), rounds)  # type: ignore[misc]
        print(f"{name:42}{seconds:9.3f}{seconds / plain:10.2f}", flush=True)


if __name__ == "__main__":
    main()
