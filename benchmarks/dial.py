"""The constants of `onward train --time`: small runs on two texts, and the law of the loss that is fitted to them.

    python -m benchmarks.dial
    python -m benchmarks.dial --shakespeare FILE

Each run corresponds to `onward train --steps` with a model size of onward/training/clock/dial.py. Its loss, as the
ratio of its bits per byte to those of bz2, is fitted as f (E + A / N^alpha + B / D^beta): N is the number of parameters
in the blocks, D the number of bytes it was trained on, repeated bytes counting less, and f a factor of the text; the
geometric mean of the factors is 1. E is fixed, because small runs do not determine it. The command prints the runs, the
constants for dial.py, the ratio of the factors, and the largest error of the law. It takes about ten minutes on one
core.
"""

import argparse
import math
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.text import SHARED, machine
from onward import Run, RunConfig
from onward.planning import LossLaw, RunPoint
from onward.training.clock.dial import SIZES, compression, effective

WIDTHS = {size["d_model"]: size for size in SIZES}
STEPS = {  # by text and width
    "embedded": {64: (150, 600, 2400), 128: (150, 500, 1200), 256: (80,)},
    "shakespeare": {64: (400, 1600, 6400), 96: (3500,), 128: (400, 1200, 2800), 256: (120,)},
}
FLOOR = 0.5  # E
LONGEST = 4.0  # weight of the longest run of each size: the additive law underestimates how soon small models saturate
TOKENIZERS = {"embedded": "bpe:4096", "shakespeare": "char"}


def point(source: str, tokenizer: str, width: int, steps: int, folder: Path) -> tuple[RunPoint, float]:
    """Train a run; return its point (parameters in blocks, effective bytes, bits per byte relative to bz2) and its bits
    per byte."""
    config = RunConfig(
        sources=(source,),
        tokenizer=tokenizer,
        out=str(folder),
        steps=steps,
        validate_every=steps,
        model=WIDTHS[width],
        optimizer="muon",
    )
    run = Run.start(config)
    for _ in run.train():
        pass
    bits = run.inputs.evaluate(run.model, run.tokenizer, run.trainer.loss, 32_768)["bits_per_byte"]
    parameters = sum(p.numel() for p in run.model.blocks.parameters())
    seen = steps * config.batch_size * run.model.config.context_length
    compressed = compression(run.tokenizer, run.inputs)
    read = effective(seen, run.inputs.tokens) * compressed.bytes_per_token
    return RunPoint(parameters, read, bits / compressed.bits_per_byte), bits


def weight(point: RunPoint, points: list[RunPoint]) -> float:
    """The weight of a run among those on a text: LONGEST if no other run of its size is longer."""
    return LONGEST if point.tokens == max(one.tokens for one in points if one.parameters == point.parameters) else 1.0


def fitted(points: dict[str, list[RunPoint]]) -> tuple[LossLaw, float, float]:
    """The law of the runs on two texts, the ratio of the factors of the texts, and the largest error of log L."""
    rows = [(*p, place - 0.5, weight(p, found)) for place, found in enumerate(points.values()) for p in found]
    n, d, loss, side, weights = np.array(rows).T
    best = (math.inf, LossLaw(FLOOR, 0, 0, 0, 0), 0.0, 0.0)
    for alpha, beta, ratio in product(
        np.linspace(0.1, 0.6, 26), np.linspace(0.1, 0.6, 51), np.linspace(-0.15, 0.15, 31)
    ):
        level = loss * np.exp(side * ratio)
        terms = np.stack([n**-alpha, d**-beta], 1)
        scales = np.linalg.lstsq(terms * (weights / level)[:, None], (level - FLOOR) / level * weights)[0]
        if min(scales) > 0:
            error = np.log(terms @ scales + FLOOR) - np.log(level)
            law = LossLaw(FLOOR, float(scales[0]), float(scales[1]), float(alpha), float(beta))
            best = min(
                best,
                (float(np.square(weights * error).sum()), law, float(ratio), float(abs(error).max())),
                key=lambda one: one[0],
            )
    return best[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shakespeare", default=str(SHARED / "tinyshakespeare.txt"), help="the text tinyshakespeare")
    options = parser.parse_args()
    sources = {"embedded": "embedded", "shakespeare": options.shakespeare}
    print(machine())
    points: dict[str, list[RunPoint]] = {text: [] for text in STEPS}
    print(f"{'text':14}{'width':>6}{'steps':>7}{'in blocks':>12}{'bytes':>12}{'bits/byte':>11}{'of bz2':>8}")
    for text, widths in STEPS.items():
        for width, steps in ((width, steps) for width, lengths in widths.items() for steps in lengths):
            with TemporaryDirectory() as folder:
                found, bits = point(sources[text], TOKENIZERS[text], width, steps, Path(folder) / "run")
            points[text].append(found)
            numbers = f"{found.parameters:12,.0f}{found.tokens:12,.0f}{bits:11.4f}{found.loss:8.4f}"
            print(f"{text:14}{width:6}{steps:7}{numbers}", flush=True)
    law, ratio, error = fitted(points)
    print(f"\nLAW = LossLaw(E={law.E:g}, A={law.A:.3g}, B={law.B:.3g}, alpha={law.alpha:.2g}, beta={law.beta:.2g})")
    print(
        f"the texts' factors differ by a factor of {math.exp(ratio):.3f}; no run is more than {error:.1%} from the law"
    )


if __name__ == "__main__":
    main()
