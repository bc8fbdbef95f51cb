"""The same work in two versions of Onward, alternately: decoding, a prompt, a traced prompt, training steps.

    git worktree add /tmp/before 5995302
    python -m benchmarks.versions /tmp/before/src src [--rounds 7] [--training]

With --training, only the training steps of the quickstart's model on the quickstart's text are timed.

Each version runs in a separate process, with one thread. CPU time is measured, because other programs affect it less
than wall-clock time; the ratio is the median over the rounds, below 1 if the second version is faster. Only public
names are used, so that the same calls work in both versions.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

LENGTH, NEW, WARM = 512, 64, 20  # tokens of the prompt, new tokens of an answer, steps that are not counted


def lower_fifth(seconds: list[float]) -> float:
    """The 20th percentile of `seconds`, in milliseconds."""
    return 1000 * sorted(seconds)[len(seconds) // 5]


def timed(call: Callable[[], object], count: int) -> float:
    """The 20th percentile of the CPU times of `count` calls, in milliseconds."""
    seconds = []
    for _ in range(count):
        start = process_time()
        call()
        seconds.append(process_time() - start)
    return lower_fifth(seconds)


def measure(folder: Path) -> dict[str, float]:
    import torch

    import onward

    torch.manual_seed(0)
    config = onward.DecoderConfig(
        vocab_size=4096, d_model=256, n_layers=8, n_heads=8, n_kv_heads=4, context_length=LENGTH
    )
    model = onward.Decoder(config).eval()

    def decoding(compile_after: int | None) -> float:
        engine = onward.Engine(model, rows=1, compile_after=compile_after)
        sampling = onward.Sampling(temperature=0.8)
        engine.add(onward.Request(list(range(2, 66)), sampling=sampling, max_new_tokens=WARM + NEW, seed=0))
        for _ in range(WARM):
            engine.step()
        return timed(engine.step, NEW - 1)

    @torch.no_grad()
    def forward() -> object:
        return model(tokens)

    tokens = torch.randint(4096, (1, LENGTH))
    times = {"plain decoding step": min(decoding(None) for _ in range(4))}
    decoding(4)  # compiles the kernels
    times["compiled decoding step"] = min(decoding(4) for _ in range(4))
    timed(forward, 4)
    times[f"prompt of {LENGTH} tokens"] = timed(forward, 12)
    with onward.trace(model, "blocks.*.out"):
        times["the same, traced"] = timed(forward, 6)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 3000)
    tiny = training_step(folder / "tiny", sources=(str(folder / "text.txt"),), preset="tiny")
    return times | {"training step, preset tiny": tiny}


def training_step(out: Path, **options: Any) -> float:
    """The time of a training step, in milliseconds, of a run with these options."""
    import onward

    run = onward.Run.start(onward.RunConfig(out=str(out), steps=40, device="cpu", **options))
    seconds, start = [], process_time()
    for event in run.train():
        if isinstance(event, onward.Step):
            seconds.append(process_time() - start)
        start = process_time()
    return lower_fifth(seconds)


def measure_training(folder: Path) -> dict[str, float]:
    """The time of a training step of the quickstart's model in this version, for two of its possible sizes."""
    sizes = {"mini": {}, "96 wide": {"d_model": 96, "n_heads": 3}}
    return {
        f"training step, {name}": training_step(
            folder / name, sources=("embedded",), optimizer="muon", preset="mini", model=model
        )
        for name, model in sizes.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs=2, type=Path, help="the folders `src` of two versions")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each version, alternately (default: 7)")
    parser.add_argument("--training", action="store_true", help="time only the quickstart's training steps")
    options = parser.parse_args()
    if os.environ.get("ONWARD_MEASURES"):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps((measure_training if options.training else measure)(Path(folder))))
        return
    rounds: list[list[dict[str, float]]] = []
    for number in range(options.rounds):
        order = options.sources if number % 2 == 0 else options.sources[::-1]
        times = {source: child(source, options.training) for source in order}
        rounds.append([times[source] for source in options.sources])
    for name in rounds[0][0]:
        before, after = ([one[version][name] for one in rounds] for version in (0, 1))
        ratio = median(b / a for a, b in zip(before, after))
        print(f"{name:28} {min(before):8.2f} ms {min(after):8.2f} ms   {ratio:.2f}")


def child(source: Path, training: bool) -> dict[str, float]:
    """The times of the version in a folder; with `training`, of training steps only."""
    root = Path(__file__).parents[1]
    environment = {"PYTHONPATH": f"{source.resolve()}:{root}", "OMP_NUM_THREADS": "1", "ONWARD_MEASURES": "1"}
    words = [sys.executable, "-m", "benchmarks.versions", *[str(source)] * 2, *["--training"] * training]
    done = subprocess.run(words, env=os.environ | environment, cwd=root, capture_output=True, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


if __name__ == "__main__":
    main()
