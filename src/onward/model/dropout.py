"""A model without dropout, as in evaluation and generation."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the `with` block, and restore its mode afterwards."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()
