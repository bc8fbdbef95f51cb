"""Plans a grid of small runs to fit a scaling law: for each of several compute budgets, model sizes around the
estimated optimum.

Sizes differ only in width, and muP transfers one learning rate to all widths. The batch grows with the tokens D as D **
0.383 (Bergsma et al. 2025, arXiv:2505.13738), rounded to a power of two, and the learning rate grows with the square
root of the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from onward.base.errors import UserError
from onward.model.decoder import Decoder
from onward.planning.parameters import parameters
from onward.training.clock.calibration import fastest_options
from onward.training.config import RunConfig
from onward.training.inputs.texts import Inputs
from onward.training.step.build import build_trainer
from onward.training.step.trainer import StepPlan
from onward.training.studies.variants import Variant

BUDGETS, SIZES = 4, 3  # numbers of compute budgets, and of models per budget
# ratio of successive budgets; successive sizes differ by its square root, so that budgets have sizes in common
RATIO = 3.0
BEST = 20.0  # tokens per parameter at the center of the sizes
BASE = 64  # width for which the learning rate was tuned
BATCH, AT, GROWTH = 1024, 1e6, 0.383  # tokens per batch for 1e6 training tokens, and the exponent of growth
LEAST_STEPS = 16  # minimum steps of a run
FEW_STEPS = 100  # in shorter runs, the loss depends more on the first steps than on model size and data
TIMED = 3  # timed steps, after one warm-up step
START = 0.6  # seconds of a run besides its steps and its evaluation


@dataclass(frozen=True)
class Cell:
    """One run in a grid of small runs, to which a scaling law is fitted: the width of its model, the number of
    parameters, the windows (sequences of `context` tokens) per step, and the number of steps."""

    width: int
    parameters: int
    batch: int  # windows per step
    steps: int
    context: int

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.context

    @property
    def flops(self) -> float:
        return 6.0 * self.parameters * self.tokens

    def variant(self, config: RunConfig) -> Variant:
        """Return the run as a Variant, a named configuration that `train_variants` trains: `config` with this width,
        batch size and number of steps, and a learning rate that fits these."""
        rate = config.peak_learning_rate(BASE) * math.sqrt(self.batch * self.context / BATCH)
        options: dict[str, Any] = {"mup": config.mup or BASE, "learning_rate": rate, "batch_size": self.batch}
        options |= {"model": {**config.model, "d_model": self.width}, "steps": self.steps, "time": ""}
        return Variant(f"width-{self.width}-steps-{self.steps}", replace(config, **options, validate_every=self.steps))


class Sizes:
    """The possible widths of the decoder that a configuration describes, and its number of parameters at each width."""

    def __init__(self, config: RunConfig, vocab_size: int) -> None:
        self.config, self.vocab_size = config, vocab_size
        decoder = config.decoder(vocab_size)
        self.context = decoder.context_length
        self.step = 2 * decoder.n_heads  # step between widths, so that head sizes are even, for rotary positions
        self.known: dict[int, int] = {}

    def parameters(self, width: int) -> int:
        """Return the number of parameters that the decoder has at a width."""
        if width not in self.known:
            wider = replace(self.config, model={**self.config.model, "d_model": width})
            self.known[width] = parameters(wider.decoder(self.vocab_size))
        return self.known[width]

    def width(self, size: float) -> int:
        """Return the width at which the decoder has about `size` parameters."""
        low, high = 1, 2
        while self.parameters(high * self.step) < size:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.parameters(middle * self.step) < size else (low, middle)
        return min((low, high), key=lambda n: abs(math.log(self.parameters(n * self.step) / size))) * self.step

    def cell(self, width: int, flops: float) -> Cell:
        """Return a run that trains the decoder at a width with about `flops` floating-point operations in total."""
        size = self.parameters(width)
        tokens = flops / 6 / size
        batch = BATCH * (tokens / AT) ** GROWTH / self.context
        windows = max(1, 2 ** round(math.log2(max(1.0, batch))))
        return Cell(width, size, windows, round(tokens / windows / self.context), self.context)


def grid(sizes: Sizes, largest: float) -> list[Cell]:
    """List the runs of a grid: three model sizes for each of four budgets; the largest budget is `largest`
    floating-point operations. The most useful runs come first: small budgets and middle sizes. The list is empty if a
    run would have fewer than 16 steps."""
    budgets = [largest / RATIO ** (BUDGETS - 1 - k) for k in range(BUDGETS)]
    least = sizes.parameters(sizes.step)
    first = max(least, math.sqrt(budgets[0] / 6 / BEST / RATIO))
    widths: list[int] = []
    for place in range(BUDGETS + SIZES - 1):
        width = sizes.width(first * RATIO ** (place / 2))
        widths.append(max(width, widths[-1] + sizes.step) if widths else width)
    cells = [sizes.cell(widths[k + place], flops) for k, flops in enumerate(budgets) for place in (1, 0, 2)]
    return cells if min(cell.steps for cell in cells) >= LEAST_STEPS else []


def larger(sizes: Sizes, flops: float, size: float, known: Sequence[Cell]) -> Cell:
    """Return a run of `flops` floating-point operations with about `size` parameters, which tests the law fitted to the
    grid `known`: at least the smallest model size of this grid, and at most ten times its largest."""
    least, most = min(cell.parameters for cell in known), max(cell.parameters for cell in known)
    return sizes.cell(sizes.width(min(max(size, least), 10 * most)), flops)


@dataclass(frozen=True)
class Speed:
    """The speed of training on this machine: a step takes `fixed` seconds plus `per_flop` seconds for each
    operation."""

    fixed: float
    per_flop: float

    def seconds(self, cell: Cell, evaluated: int) -> float:
        """Estimate the seconds of the run `cell` and of its evaluation on `evaluated` tokens; evaluating a token takes
        a third of the operations of training on it."""
        evaluation = 2.0 * cell.parameters * evaluated * self.per_flop
        return START + cell.steps * self.fixed + cell.flops * self.per_flop + evaluation


def measured(config: RunConfig, inputs: Inputs, vocab_size: int, cells: Sequence[Cell]) -> Speed:
    """Measure the speed of this machine with a few steps each of two runs, `cells`: a small and a large one."""
    seconds = []
    for cell in cells:
        own = cell.variant(config).config
        trainer = build_trainer(own, Decoder(own.decoder(vocab_size)).to(torch.device(config.device)))
        batch = inputs.windows(own, cell.context).read(range(cell.batch)).to(trainer.device)
        times = []
        for _ in range(1 + TIMED):
            start = perf_counter()
            trainer.train_step(StepPlan([batch]))
            times.append(perf_counter() - start)
        seconds.append((sorted(times[1:])[TIMED // 2], cell.flops / cell.steps))
    (quick, few), (slow, many) = seconds
    per_flop = max(0.0, slow - quick) / max(1.0, many - few)
    return Speed(max(0.0, quick - few * per_flop), per_flop)


def with_precision(config: RunConfig, inputs: Inputs, vocab_size: int, cell: Cell) -> RunConfig:
    """Return the configuration with the fastest precision and backend of experts for the run `cell`, by timing; all
    runs of the grid use them. `inputs` are the prepared texts."""
    own = cell.variant(config).config
    model = Decoder(own.decoder(vocab_size)).to(torch.device(config.device))
    trial = lambda: build_trainer(own, model)
    chosen = fastest_options(own, trial, model, inputs.windows(own, cell.context), math.inf)
    return replace(config, precision=chosen.precision, experts=chosen.experts)


def largest_budget(fits: Callable[[float], bool], least: float) -> float:
    """Find the largest number of floating-point operations, between `least` and 1e12 times `least`, for which `fits`
    returns true; 0 if `least` does not fit. Used to plan the largest grid for a time limit."""
    if not fits(least):
        return 0.0
    low, high = 0.0, 12.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(least * 10**middle) else (low, middle)
    return least * 10**low


def least_budget(sizes: Sizes) -> float:
    """Return the floating-point operations of the largest run in the smallest possible grid. Raises a UserError if no
    grid of runs has models of these sizes."""
    low, high = 6.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if grid(sizes, 10**middle) else (middle, high)
    if not grid(sizes, 10**high):
        raise UserError("no grid of runs has models of these sizes: choose a smaller preset")
    return float(10**high)
