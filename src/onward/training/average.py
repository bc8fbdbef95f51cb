"""The exponential moving average of a model's weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """The mean of the weights after every update, each counting `decay` times as much as the one after it.

    It is kept in at least fp32, and the weights before the first update have no share in it. `tensors`, by parameter
    name, and `updates`, how many there were, are its state.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay, self.updates = model, decay, 0
        self.tensors: dict[str, Tensor] = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in model.named_parameters()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into the average."""
        self.updates += 1
        share = (1 - self.decay) / (1 - self.decay**self.updates)
        for name, parameter in self.model.named_parameters():
            average = self.tensors[name]
            average.lerp_(parameter.to(average.dtype), share)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The model has the averaged weights; afterwards its own."""
        own = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.put(self.tensors)
        try:
            yield
        finally:
            self.put(own)

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the model these weights."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])
