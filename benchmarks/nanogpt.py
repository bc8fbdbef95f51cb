"""Training compared with nanoGPT on the CPU: its model and loop, and the recipe of its README.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.nanogpt speed --nanogpt nanoGPT      time of a step at equal sizes, data and batch, in turns
python -m benchmarks.nanogpt recipe --nanogpt nanoGPT losses on tinyshakespeare, Onward's also in 1/7 of the time

nanoGPT runs unchanged, in fp32 without torch.compile, as its README recommends for a CPU; Onward runs in bf16 (in
`recipe`, only if this is faster). Both train on the first 1,003,854 characters and validate on the last 111,540.
nanoGPT's loss is the value that its loop prints, over 20 random batches; Onward's loss is over the whole validation
text.
"""

import argparse
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch

import onward
from benchmarks.text import SHARED, machine
from onward import Batch, StepConfig, StepPlan, Trainer
from onward.training import optimizers

TRAIN = 1_003_854  # characters
RECIPE = """
    --device=cpu --compile=False --eval_iters=20 --log_interval=100 --block_size=64 --batch_size=12 --n_layer=4
    --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
"""
SIZES = ((128, 4, 4, 64, 12), (384, 6, 6, 256, 12))  # width, layers, heads, context, batch
Step = Callable[[], object]


def their_step(folder: Path, size: tuple[int, ...], tokens: torch.Tensor) -> Step:
    """A step of nanoGPT's loop: forward, backward, clipping, AdamW."""
    sys.path.insert(0, str(folder))
    model_file: Any = __import__("model")
    width, layers, heads, context, _ = size
    config = model_file.GPTConfig(
        block_size=context, vocab_size=65, n_layer=layers, n_head=heads, n_embd=width, dropout=0.0, bias=False
    )
    model = model_file.GPT(config)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")

    def step() -> None:
        _, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_model(size: tuple[int, ...]) -> onward.Decoder:
    width, layers, heads, context, _ = size
    config = onward.DecoderConfig(
        vocab_size=65,
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        context_length=context,
        position=onward.Learned(),
        attention=onward.SelfAttention(),
        mlp=onward.Plain(),
        norm=onward.LayerNorm(bias=False),
        tied=True,
    )
    return onward.Decoder(config)


def our_step(size: tuple[int, ...], tokens: torch.Tensor) -> Step:
    model = our_model(size)
    adamw = optimizers(model, "adamw", 1e-3, 0.1, (0.9, 0.99))
    trainer = Trainer(model, adamw, lambda step: 1e-3, StepConfig(clip=1.0, precision="bf16"))
    plan = StepPlan([Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())])
    return lambda: trainer.train_step(plan)


def speed(folder: Path, rounds: int) -> None:
    print(f"{'width':>6}{'nanoGPT':>12}{'onward':>12}{'ratio':>8}   medians; best of each: ratio")
    for size in SIZES:
        tokens = torch.randint(0, 65, (size[-1], size[3] + 1))
        steps = their_step(folder, size, tokens), our_step(size, tokens)
        taken: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds + 2):
            for step, times in zip(steps, taken):
                start = perf_counter()
                step()
                if turn > 1:
                    times.append(perf_counter() - start)
        theirs, ours = map(statistics.median, taken)
        best = min(taken[0]) / min(taken[1])
        print(f"{size[0]:6}{theirs * 1e3:10.1f}ms{ours * 1e3:10.1f}ms{theirs / ours:8.2f}   {best:.2f}")


def their_recipe(folder: Path, text: str, work: Path) -> tuple[float, float]:
    """The seconds that the recipe takes in a copy of the repository, and its final loss."""
    letters = sorted(set(text))
    ids = np.array([letters.index(c) for c in text], dtype=np.uint16)
    copy = shutil.copytree(folder, work / "nanoGPT", ignore=shutil.ignore_patterns(".git"))
    data = copy / "data" / "shakespeare_char"
    ids[:TRAIN].tofile(data / "train.bin")
    ids[TRAIN:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))
    folder = folder.resolve()
    command = [
        sys.executable,
        str(folder / "train.py"),
        str(folder / "config/train_shakespeare_char.py"),
        *RECIPE.split(),
    ]
    start = perf_counter()
    done = subprocess.run(command, cwd=copy, check=True, capture_output=True, text=True)
    losses = re.findall(r"step \d+: train loss [\d.]+, val loss ([\d.]+)", done.stdout)
    return perf_counter() - start, float(losses[-1])


def our_run(text: str, seconds: float, work: Path) -> tuple[float, dict[str, float]]:
    """The seconds of `onward train` as a whole, and the figures in its result.json."""
    (work / "train.txt").write_text(text[:TRAIN])
    (work / "held.txt").write_text(text[TRAIN:])
    command = "-m onward train train.txt --validation held.txt --tokenizer char --evaluation-tokens 200000 --out run"
    start = perf_counter()
    subprocess.run(
        [sys.executable, *command.split(), "--time", f"{seconds:.0f}s"], cwd=work, check=True, stdout=sys.stderr
    )
    return perf_counter() - start, json.loads((work / "run/result.json").read_text())


def recipe(folder: Path, text: str) -> None:
    """Print the loss of nanoGPT's recipe, and Onward's losses after a seventh of this time and after the same time."""
    with TemporaryDirectory() as work:
        whole, loss = their_recipe(folder, text, Path(work))
    print(f"nanoGPT         {whole:6.0f} s   loss {loss:.4f}")
    for share in (7, 1):
        with TemporaryDirectory() as work:
            taken, result = our_run(text, whole / share, Path(work))
        print(
            f"onward, 1/{share}     {taken:6.0f} s   loss {result['loss']:.4f} after {result['step']:,} steps",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "recipe"])
    parser.add_argument("--nanogpt", default="nanoGPT", help="the folder of nanoGPT's repository")
    parser.add_argument("--shakespeare", default=str(SHARED / "tinyshakespeare.txt"), help="the text tinyshakespeare")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each program")
    options = parser.parse_args()
    folder = Path(options.nanogpt)
    if not (folder / "train.py").exists():
        sys.exit(
            f"{folder} is not nanoGPT: git clone https://github.com/karpathy/nanoGPT, and give its folder as --nanogpt"
        )
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}")
    if options.what == "speed":
        speed(folder, options.rounds)
    else:
        recipe(folder, Path(options.shakespeare).read_text())


if __name__ == "__main__":
    main()
