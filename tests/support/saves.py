"""The training state for a save, made without a trainer."""

from typing import Any

import torch
from torch import Tensor

from onward import Decoder
from onward.checkpoint.saves.state import TrainerState, training_tensors

CPU = torch.device("cpu")


def state_of(
    model: Decoder,
    optimizers: list[torch.optim.Optimizer],
    progress: dict[str, Any],
    average: dict[str, Tensor] | None = None,
) -> TrainerState:
    """The training state of a model, its optimizers and its average, with the names of frozen parameters in the
    progress."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    return TrainerState(training_tensors(model, optimizers, average), progress | {"frozen": frozen})
