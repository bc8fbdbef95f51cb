"""Training of modules that read a model, such as a tuned lens, on windows of tokens of the data pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from time import perf_counter

import torch
from torch import nn

from onward.data.tokens import Tokens
from onward.data.windows import Windows
from onward.errors import UserError
from onward.model.decoder import Decoder
from onward.training.step.loss import Loss
from onward.training.step.trainer import Step, StepPlan, Trainer

STEPS, ROWS, WINDOW = 500, 8, 128  # steps at most, windows of a step, tokens of a window at most
RATE = 0.6  # the learning rate at the start, times the width of the activation


def windows_of(model: Decoder, tokens: Tokens, seed: int = 0) -> Windows:
    """Windows of a text to train on, of at most WINDOW tokens."""
    if len(tokens) < 2:
        raise UserError("there is no text to train on: name a longer one")
    return Windows([tokens], min(WINDOW, model.config.context_length, len(tokens) - 1), seed)


def fit(
    module: nn.Module,
    loss: Loss,
    windows: Windows,
    *,
    steps: int = STEPS,
    seconds: float = math.inf,
    rate: float = 0.0,
) -> Iterator[Step]:
    """Train a module by the Trainer with Adam on the first windows of a text, and yield its steps.

    It ends after `steps`, or after the first for which `seconds` have passed; the learning rate falls linearly until
    then, by default from RATE over the width of the activation. `loss` is `LensLoss` for a TunedLens,
    `ReconstructionLoss` for a SparseAutoencoder.

    >>> lens = TunedLens(model)
    >>> for step in fit(lens, LensLoss(model), windows_of(model, tokens), seconds=60):
    ...     print(step.loss)
    """
    rate = rate or RATE / max(min(matrix.shape) for matrix in module.parameters() if matrix.ndim == 2)
    optimizer = torch.optim.Adam(module.parameters())
    start = perf_counter()
    done = lambda step: max(step / steps, (perf_counter() - start) / seconds)
    trainer = Trainer(module, [optimizer], lambda step: rate * max(0.0, 1 - done(step)), loss=loss)
    for step in range(steps):
        if step == 0 or done(step) < 1:
            yield trainer.train_step(StepPlan([windows.read(range(ROWS * step, ROWS * (step + 1)))]))
