"""Training of modules that read a model's activations, such as a tuned lens, on windows of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from time import perf_counter

import torch
from torch import nn

from onward.base.errors import UserError
from onward.data.tokens import Tokens
from onward.data.windows import Windows
from onward.inspection.features import ReconstructionLoss, SparseAutoencoder, autoencoder_of
from onward.inspection.lens import LensLoss, TunedLens
from onward.model.decoder import Decoder
from onward.tracing.names import full_name
from onward.training.step.loss import Loss
from onward.training.step.trainer import Step, StepPlan, Trainer

STEPS, ROWS, WINDOW = 500, 8, 128  # maximum number of steps, windows per step, maximum number of tokens per window
RATE = 0.6  # initial learning rate times the width of the activation


def windows_of(model: Decoder, tokens: Tokens, seed: int = 0) -> Windows:
    """Cut the tokens of a text into windows that train a lens or an autoencoder: at most WINDOW tokens each, within the
    model's context, shuffled by `seed`. Raises a UserError for a text of fewer than two tokens."""
    if len(tokens) < 2:
        raise UserError("Cannot train on a text of fewer than two tokens: give a longer one")
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
    """Train a lens or an autoencoder with Adam on windows of a text, and yield the training steps.

    Training ends after `steps`, or after the first step past `seconds`. The learning rate falls linearly to 0 at the
    end; it begins at `rate`, by default RATE divided by the width of the activation. `loss` is `LensLoss` for a
    TunedLens and `ReconstructionLoss` for a SparseAutoencoder.

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


def silent(step: Step) -> None: ...


def fit_lens(
    model: Decoder, tokens: Tokens, *, seconds: float = math.inf, watch: Callable[[Step], None] = silent
) -> TunedLens:
    """Train a tuned lens of a model on a text of `tokens`, for at most about `seconds` seconds, and return it; `watch`
    is called after each training step."""
    lens = TunedLens(model)
    for step in fit(lens, LensLoss(model), windows_of(model, tokens), seconds=seconds):
        watch(step)
    return lens


def fit_features(
    model: Decoder,
    tokens: Tokens,
    activation: str = "",
    *,
    seconds: float = math.inf,
    watch: Callable[[Step], None] = silent,
) -> tuple[SparseAutoencoder, str]:
    """Train a sparse autoencoder of an activation ("": the residual stream after the middle block) on a text of
    `tokens`, for at most about `seconds` seconds; `watch` is called after each training step. Returns (autoencoder,
    full name of the activation)."""
    name = full_name(activation or f"blocks.{model.config.n_layers // 2}")
    autoencoder = autoencoder_of(model, name)
    for step in fit(autoencoder, ReconstructionLoss(model, name), windows_of(model, tokens), seconds=seconds):
        watch(step)
    return autoencoder, name
