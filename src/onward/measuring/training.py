"""Measures the speed of training: tokens per second, seconds of each phase of a step, and model FLOPs utilization.

Model FLOPs utilization (MFU; PaLM, Chowdhery et al. 2022, appendix B) counts the operations that a step needs, without
those that recomputation adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from onward.config.decoder import DecoderConfig
from onward.data.tokens import Tokens
from onward.data.windows import Batch, Windows
from onward.measuring.generation import LARGEST
from onward.model.decoder import Decoder
from onward.planning.flops import training_flops
from onward.planning.machine import wait
from onward.planning.parameters import parameters
from onward.training.presets import decoder
from onward.training.step.optimizer import optimizers
from onward.training.step.precision import Precision
from onward.training.step.trainer import StepConfig, StepPlan, Trainer

WARM_UP = 2  # number of steps that are not counted
LEAST = 3  # minimum number of steps that are counted
TRIAL_TOKENS = 1024  # maximum number of tokens in a calibration step


class Stopwatch:
    """Sums the seconds of each phase of training steps."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.last = device, defaultdict[str, float](float), perf_counter()

    def note(self, part: str) -> None:
        wait(self.device)
        now = perf_counter()
        self.seconds[part] += now - self.last
        self.last = now


class TimedForward(nn.Module):
    """Wraps a LossModule and notifies a Stopwatch when its forward pass begins and ends."""

    def __init__(self, module: nn.Module, watch: Stopwatch) -> None:
        super().__init__()
        self.module, self.watch = module, watch

    def forward(self, batch: Batch) -> Any:
        self.watch.note("other")
        result = self.module(batch)
        self.watch.note("forward and loss")
        return result


class TimedTrainer(Trainer):
    """A trainer that notifies a Stopwatch when the backward pass of a step ends."""

    watch: Stopwatch

    def backward(self, batches: Sequence[Batch]) -> tuple[dict[str, float], int]:
        result = super().backward(batches)
        self.watch.note("backward")
        return result


@dataclass(frozen=True)
class TrainingSpeed:
    """Measured speed of training in one precision and number of windows."""

    precision: str
    batch: int
    context: int  # tokens in a window
    tokens_per_second: float
    flops_per_token: float  # operations that training needs per token
    flops_share: float  # operations per second, as a share of the device's peak
    seconds: dict[str, float]  # seconds of each part of a step

    @property
    def step(self) -> float:
        return sum(self.seconds.values())


def measure_training(
    model: Decoder,
    precision: str,
    batch: int,
    context: int,
    *,
    peak: float,
    seconds: float = 5.0,
    optimizer: str = "adamw",
    warm_up: int = WARM_UP,
    least: int = LEAST,
) -> TrainingSpeed:
    """Train a model on random tokens, `batch` windows of `context` tokens in a step, for about `seconds` seconds, and
    measure the speed; changes the model's weights. Takes at least `least` steps after `warm_up` steps that are not
    counted. `peak` is the device's peak in this precision, in operations per second."""
    config, watch = model.config, Stopwatch(model.device)
    parts = optimizers(model, optimizer, 1e-5, 0.1, (0.9, 0.99))
    for part in parts:
        part.register_step_pre_hook(lambda *_: watch.note("clipping"))
        part.register_step_post_hook(lambda *_: watch.note("optimizer"))
    trainer = TimedTrainer(
        model,
        parts,
        lambda step: 1e-5,
        StepConfig(1.0, cast(Precision, precision)),
        wrap=lambda module: TimedForward(module, watch),
    )
    trainer.watch = watch
    ids = np.random.default_rng(0).integers(config.vocab_size, size=16 * batch * context + 1)
    windows = Windows([Tokens.of(ids)], context, seed=0)
    steps, begin = 0, perf_counter()
    while steps < warm_up + least or perf_counter() - begin < seconds:
        if steps == warm_up:
            watch.seconds.clear()
        watch.note("other")
        plan = StepPlan([windows.read(range(steps * batch, (steps + 1) * batch)).to(model.device)])
        watch.note("data")
        trainer.train_step(plan)
        watch.note("other")
        steps += 1
    taken = {part: spent / (steps - warm_up) for part, spent in watch.seconds.items()}
    speed = batch * context / sum(taken.values())
    operations = training_flops(config, context)
    return TrainingSpeed(precision, batch, context, speed, operations, speed * operations / peak, taken)


def trial_share(
    config: DecoderConfig, precision: str, context: int, peak: float, device: torch.device, seconds: float = 1.0
) -> float:
    """Share of the device's `peak` that training reaches, in about `seconds`; a large decoder is replaced by the preset
    `small`."""
    context = min(context, TRIAL_TOKENS)
    if parameters(config) > LARGEST:
        config = replace(decoder("small", min(config.vocab_size, 8192), {}), context_length=context)
    model, batch = Decoder(config).train().to(device), max(1, TRIAL_TOKENS // context)
    speed = measure_training(model, precision, batch, context, peak=peak, seconds=seconds, warm_up=1, least=1)
    return speed.flops_share
