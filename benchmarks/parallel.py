"""Two processes compared with one: training steps per second, and the fraction of communication hidden by computation.

    python -m benchmarks.parallel [--rounds 3] [--steps 6] [--precision fp32]

A GPT of 10.6 M parameters in its blocks (6 layers, width 384, context 256) trains on 12 windows per step: by one
process with two threads, and by two processes with one thread each, as replicas and as shards. Each round starts these
three setups one after the other. For each setup, the table shows the median step time of all rounds, and the steps per
second relative to the single process (median and range over the rounds). The last columns come from a trace of
torch.profiler: the share of a step that is communication, and the share of communication during which the process
computes.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from statistics import median
from time import perf_counter
from typing import Literal

import torch
from torch.profiler import profile

import onward
from onward import RunConfig
from onward.config.mesh import Mesh
from onward.parallel.processes import Processes
from onward.training.step.build import build_trainer

CONFIG = onward.DecoderConfig(vocab_size=256, d_model=384, n_layers=6, n_heads=6, context_length=256)
WINDOWS, COUNT, WARM = 12, 2, 2  # windows of a step, processes, and steps that are not timed
TARGETS = {"": "", "replicate=2": "0.95", "shard=2": "0.85"}
NAMES = {"": "one process, two threads", "replicate=2": "two processes, replicas", "shard=2": "two processes, shards"}
Spans = list[tuple[float, float]]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of each setup (default: 3)")
    parser.add_argument("--steps", type=int, default=6, help="number of timed steps per run (default: 6)")
    parser.add_argument(
        "--precision", default="fp32", choices=["fp32", "bf16"], help="precision of training (default: fp32)"
    )
    parser.add_argument("--child", metavar="MESH", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        train(options.child, options.steps, options.precision)
        return
    found: dict[str, list[tuple[list[float], float, float]]] = {mesh: [] for mesh in NAMES}
    for _ in range(options.rounds):
        for mesh, turns in found.items():
            turns.append(launched(mesh, ["--steps", str(options.steps), "--precision", options.precision]))
    print(f"{'':28}{'step':>10}{'ratio':>8}{'range':>16}{'target':>8}{'sending':>9}{'hidden':>8}")
    speeds = {mesh: [1 / median(seconds) for seconds, *_ in turns] for mesh, turns in found.items()}
    for mesh, turns in found.items():
        step = median(one for seconds, *_ in turns for one in seconds)
        ratios = [speed / alone for speed, alone in zip(speeds[mesh], speeds[""])]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if mesh else ""
        shares = median(turn[1] for turn in turns), median(turn[2] for turn in turns)
        sending, hidden = (f"{share:.0%}" if mesh else "" for share in shares)
        figures = f"{median(ratios):>8.2f}{spread:>16}{TARGETS[mesh]:>8}{sending:>9}{hidden:>8}"
        print(f"{NAMES[mesh]:28}{step * 1e3:>7.0f} ms{figures}")


def launched(mesh: str, options: list[str]) -> tuple[list[float], float, float]:
    """The step times of one turn on a mesh in seconds, and the shares of communication; see `communication`."""
    count = COUNT if mesh else 1
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if mesh else []
    command = [sys.executable, *launcher, "-m", "benchmarks.parallel", *options, "--child", mesh]
    environment = os.environ | {"OMP_NUM_THREADS": str(COUNT // count)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{NAMES[mesh]} failed:\n{done.stderr[-2000:]}")
    seconds, sending, hidden = json.loads(done.stdout.splitlines()[-1])
    return seconds, sending, hidden


def train(mesh: str, steps: int, precision: Literal["fp32", "bf16"]) -> None:
    """Train as one process of a mesh; the first process prints its seconds per step, and the shares of
    communication."""
    processes = Processes.join()
    if mesh:
        processes = processes.arranged(Mesh.parse(mesh)).connected(torch.device("cpu"))
    torch.manual_seed(0)
    options = RunConfig(precision=precision, optimizer="adamw", learning_rate=1e-3, steps=1000, accumulation=COUNT)
    trainer = build_trainer(options, onward.Decoder(CONFIG), processes)
    tokens = torch.randint(CONFIG.vocab_size, (COUNT, WINDOWS // COUNT, CONFIG.context_length + 1))
    batches = [onward.Batch(one[:, :-1], one[:, 1:]) for one in tokens]
    plan = onward.StepPlan([batches[processes.rank]] if mesh else batches)
    seconds = []
    for _ in range(WARM + steps):
        start = perf_counter()
        trainer.train_step(plan)
        seconds.append(perf_counter() - start)
    with profile() as trace:
        step = trainer.train_step(plan)
    if not processes.rank:
        print(json.dumps((seconds[WARM:], *communication(trace, step.seconds))))


def communication(trace: profile, seconds: float) -> tuple[float, float]:
    """The share of a step of `seconds` during which a collective runs, and the share of the collectives' time during
    which a PyTorch operation also runs (0 without collectives)."""
    events = trace.events() or []
    spans = lambda prefix: merged(
        (one.time_range.start, one.time_range.end) for one in events if one.name.startswith(prefix)
    )
    collectives, computation = spans("gloo:"), spans("aten::")
    both = sum(
        max(0.0, min(end, until) - max(start, since)) for start, end in collectives for since, until in computation
    )
    sending = sum(end - start for start, end in collectives)  # microseconds
    return 1e-6 * sending / seconds, both / max(1e-9, sending)


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """Merge overlapping time spans; return them in order."""
    result: Spans = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


if __name__ == "__main__":
    main()
