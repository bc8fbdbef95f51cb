"""A head, besides the language model head, that predicts rewards, values or classes from the hidden states of a trained
model.

The head is the module `score` as in transformers' sequence classification models, and is saved with the weights.

Shapes: D d_model, N outputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.base.errors import UserError
from onward.model.decoder import Decoder

NAME = "score"  # name of the module in transformers
REWARD, VALUE = ("reward",), ("value",)  # labels of reward heads, and of the value heads of PPO


class Head(nn.Linear):
    """A trained linear head on the hidden states, in addition to the logits, for rewards, values or classes: (..., D)
    -> (..., N), computed in at least fp32. Each of the N outputs has a label."""

    def __init__(self, d_model: int, labels: Sequence[str], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(d_model, len(labels), bias=False, device=device, dtype=dtype)
        self.labels = tuple(labels)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(exact), self.weight.to(exact))


def add_head(model: Decoder, labels: Sequence[str]) -> None:
    """Add a trainable Head with weights of 0; an existing Head is kept if it has these labels, else replaced."""
    if head_labels(model) != tuple(labels):
        model.add_module(NAME, Head(model.config.d_model, labels, model.device, model.dtype))
    head_of(model).requires_grad_(True)


def head_labels(model: nn.Module) -> tuple[str, ...]:
    head = model._modules.get(NAME)
    return head.labels if isinstance(head, Head) else ()


def head_of(model: nn.Module) -> Head:
    head = model._modules.get(NAME)
    if not isinstance(head, Head):
        raise UserError(
            "the model has no head for rewards or classes: train one, for example with onward finetune --method reward"
        )
    return head
