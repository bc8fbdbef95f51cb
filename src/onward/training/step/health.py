"""Measures the health of training steps: spikes of the loss, size of updates."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from onward.parallel.processes import Processes

REMEMBERED, FEWEST = 64, 16  # number of recent losses, and minimum number of them to detect a spike


class Spikes:
    """Decides from the loss and the gradient norm whether a step failed.

    A loss is a spike if it exceeds the median of the last 64 by more than `limit` deviations and by more than twice the
    largest excess among those 64. A deviation is 1.4826 times the median absolute deviation (the standard deviation of
    normal noise), but at least 5 % of the median and 0.05 nats. Therefore neither a data source with some much harder
    batches nor a gradually rising loss causes spikes. With `limit` 0, no finite loss is a spike.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.state: list[float] = []  # recent losses except spikes; part of a trainer's state

    def check_step(self, loss: float, grad_norm: float) -> str:
        """Return the reason why a step with this loss and gradient norm fails; "" if it does not."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return "the gradient is not finite"
        if not self.limit or len(self.state) < FEWEST:
            return ""
        usual = median(self.state)
        deviation = max(1.4826 * median(abs(known - usual) for known in self.state), 0.05 * usual, 0.05)
        if loss - usual > max(self.limit * deviation, 2 * (max(self.state) - usual)):
            return f"the loss {loss:.2f} is far above {usual:.2f}, the median of recent steps"
        return ""

    def note(self, loss: float) -> None:
        self.state = [*self.state, loss][-REMEMBERED:]


def matrices(model: nn.Module, processes: "Processes | None" = None) -> list[Tensor]:
    """List the trainable matrices and stacks of matrices of a model, detached; in a pipeline, of one stage each."""
    counted = processes.counted_parameters(model) if processes else model.parameters()
    return [p.detach() for p in counted if p.requires_grad and p.ndim >= 2]


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Compute the norm of all elements of several tensors, as one vector."""
    return float(torch.stack([*map(torch.linalg.vector_norm, tensors)]).double().square().sum().sqrt())


def update_ratio(before: Sequence[Tensor], model: nn.Module, processes: "Processes | None" = None) -> float:
    """Compute the norm of the change of a model's trainable matrices divided by their norm. `before` are clones of
    `matrices(model)` made before the update.

    A typical value is 1e-3; with much less, training is slow, with much more, unstable.
    """
    exact = lambda tensor: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    norm = partial(processes.norm, model) if processes else norm_of
    moved = [exact(now - then) for now, then in zip(matrices(model, processes), before, strict=True)]
    return norm(moved) / (norm([*map(exact, before)]) or 1.0)
