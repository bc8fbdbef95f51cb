"""Helpers for tests of tracing and editing: the loss and the hooks of a model."""

from typing import Any

import torch
from torch import Tensor

from onward import Decoder

WITHOUT_GRADIENT = (".scale", ".choices", "position")


def hooks(model: Decoder) -> list[Any]:
    return [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def loss_of(logits: Tensor) -> Tensor:
    """A scalar that depends differently on each logit."""
    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
    return (logits * weights.cos()).sum()
