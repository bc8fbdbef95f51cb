"""The cost of checkpoint saves during training: the time of steps with saves divided by the time of steps without.

python -m benchmarks.saving

The results are medians of these ratios; steps with and without saves alternate. A model of 10.7 M parameters is trained
with AdamW and saved every 20 steps, every 40 steps, or continuously (the worst case); a save has 128 MB, or 171 MB with
averaged weights.
"""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.text import machine
from onward import Decoder, DecoderConfig
from onward.checkpoint.saves.saver import Saver
from onward.checkpoint.saves.state import TrainerState, training_tensors

CONFIG = DecoderConfig(vocab_size=256, d_model=384, n_layers=6, n_heads=6, context_length=256, tied=True)
STEPS, ROUNDS = 40, 3


def main() -> None:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(256, (4, 257))
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters; {machine()}")

    with tempfile.TemporaryDirectory() as folder:
        saver, held = Saver(Path(folder), 2), [0.0]

        def steps(due: Callable[[int], bool] = lambda step: False, shown: dict[str, Tensor] | None = None) -> float:
            start = perf_counter()
            for step in range(STEPS):
                if due(step):
                    begun = perf_counter()
                    state = TrainerState(training_tensors(model, [optimizer], shown), {"step": len(held)})
                    saver.save(model, state, {})
                    held.append(perf_counter() - begun)
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(tokens[:, :-1])
                F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            return perf_counter() - start

        first: Callable[[int], bool] = lambda step: step == 0
        cases: dict[str, Callable[[], float]] = {
            "every 20 steps": lambda: steps(lambda step: step % 20 == 0),
            "every 40 steps": lambda: steps(first),
            "every 40 steps, with averaged weights": lambda: steps(first, average),
            "continuously": lambda: steps(lambda step: not saver.pending or saver.pending.done()),
        }
        steps()
        ratios: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(ROUNDS):
            for name, timed in cases.items():
                without = steps()
                ratios[name].append(timed() / without)
                saver.finish()
        for name, values in ratios.items():
            print(f"{name:40}{statistics.median(values):6.3f}   ({min(values):.3f} to {max(values):.3f})")
        print(f"a step takes {without / STEPS:.3f} s; a save blocks it for {statistics.median(held):.3f} s")
        print(saver.pop_failure() or f"{len(held) - 1} saves, none failed")


if __name__ == "__main__":
    main()
