"""The exponential moving average of a model's weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from onward.model.divided import resharded


class Average:
    """The exponential moving average of the trainable parameters over all updates: the weight of each update is `decay`
    times that of the next update.

    The average is stored in at least fp32 and does not include the initial weights. Its state is `tensors`, by
    parameter name, and `updates`, the number of updates.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay, self.updates = model, decay, 0
        self.tensors: dict[str, Tensor] = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for name, p in trainable(model)
        }

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights of the model to the average; called after each optimizer step."""
        self.updates += 1
        share = (1 - self.decay) / (1 - self.decay**self.updates)
        for name, parameter in trainable(self.model):
            average = self.tensors[name]
            average.lerp_(parameter.to(average.dtype), share)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context manager: inside it, the model has the averaged weights; afterwards its own weights are restored."""
        own = {name: p.detach().clone() for name, p in trainable(self.model)}
        self.put(self.tensors)
        try:
            yield
        finally:
            self.put(own)

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights, given by parameter name, into the model's trainable parameters."""
        resharded(self.model)
        for name, parameter in trainable(self.model):
            parameter.copy_(tensors[name])


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
