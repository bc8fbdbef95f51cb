"""A draft head for a trained model; the model is frozen while the head is trained."""

from __future__ import annotations

from torch import nn

from onward.model.decoder import Decoder
from onward.model.draft_head import DraftHead

NAME = "draft_head"  # name of the draft head's module


def add_draft_head(model: Decoder, d_ff: int) -> None:
    """Freeze a model and add a trainable DraftHead with `d_ff` hidden units, in fp32."""
    model.requires_grad_(False)
    head = DraftHead(model.config.d_model, d_ff).to(model.device)
    head.initialize(model)
    model.add_module(NAME, head)


def has_draft_head(model: nn.Module) -> bool:
    return NAME in model._modules


def draft_head_of(model: nn.Module) -> DraftHead:
    head = model._modules[NAME]
    assert isinstance(head, DraftHead)
    return head
