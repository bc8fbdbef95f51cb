"""Where the time of a small model's training step goes, by phase and by kind of operation.

    python -m benchmarks.training_parts [--size 0]      0: width 128, 1: width 384, as in `benchmarks.nanogpt speed`

Phases are timed by the trainer itself. torch.profiler counts the operations and measures the time in their code. The
remaining time (Python, autograd, allocation) is computed from a step without the profiler, because profiling makes it
longer.
"""

import argparse
import statistics
from collections import Counter
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.nanogpt import SIZES, our_model, our_step
from benchmarks.text import machine
from onward.measuring import measure_training

PARTS = {
    "products": ("mm", "addmm", "bmm"),
    "attention": ("CausalAttention",),
    "activations": ("gelu",),
    "norms": ("native_layer_norm", "RMSNorm"),
    "casts and copies": ("copy_", "cat", "fill_", "zero_"),
    "sums": ("add", "add_", "sum"),
    "embedding and loss": ("embedding", "index_select", "_log_softmax", "nll_loss"),
    "clipping": ("linalg_vector_norm", "_foreach_norm", "_foreach_mul_", "mul_"),
    "AdamW": ("_fused_adamw_", "_foreach_add_", "Optimizer.step#AdamW.step"),
}


def part_of(name: str) -> str | None:
    """The part to which an operation, or the gradient of an operation, belongs; None if it belongs to no part."""
    base = name.removeprefix("aten::")
    for end in "_backward_data", "_dense_backward", "_backward", "_forward", "Backward":
        base = base.removesuffix(end)
    return next((part for part, names in PARTS.items() if base in names), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, choices=range(len(SIZES)), default=0, help="index of the size")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    size = SIZES[options.size]
    tokens = torch.randint(0, 65, (size[-1], size[3] + 1))
    step, times = our_step(size, tokens), []
    for _ in range(options.steps):
        start = perf_counter()
        step()
        times.append(perf_counter() - start)
    whole = statistics.median(times) * 1e3
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(options.steps):
            step()
    spent, calls = Counter[str](), Counter[str]()
    for event in profiler.key_averages():
        calls["all operations"] += event.count * event.key.startswith("aten::")
        calls["nodes of autograd"] += event.count * event.key.startswith("autograd::engine::")
        if part := part_of(event.key):
            spent[part] += event.self_cpu_time_total / 1e3 / options.steps
            calls[part] += event.count
    print(f"{machine()}: a step at width {size[0]} takes {whole:.1f} ms")
    measured = measure_training(our_model(size), "bf16", size[-1], size[3], peak=1.0, seconds=2.0)
    print(", ".join(f"{phase} {seconds * 1e3:.1f}" for phase, seconds in measured.seconds.items()), "ms")
    print("\n| part | ms | calls |\n| --- | --- | --- |")
    for part in PARTS:
        print(f"| {part} | {spent[part]:.2f} | {calls[part] // options.steps} |")
    print(f"| rest | {whole - spent.total():.2f} | |")
    for name in "all operations", "nodes of autograd":
        print(f"{name}: {calls[name] // options.steps}")


if __name__ == "__main__":
    main()
