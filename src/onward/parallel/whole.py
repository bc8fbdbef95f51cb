"""Whole weights of a decoder whose shards are in several processes, for an engine in each of them.

An engine decodes as many tokens as its own prompts need, so that processes could not gather the weights of each block
together. They gather all weights before, once.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from onward.model.decoder import Decoder
from onward.parallel.parts import gathered


class WholeCopy:
    """A copy of a decoder that is about to be divided into shards: its modules at once, and its weights, in the dtype
    of the decoder, at the first call of `of`."""

    def __init__(self, model: Decoder) -> None:
        outlines: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in model.parameters()
        }
        self.copy = deepcopy(model, outlines).eval()

    @torch.no_grad()
    def of(self, model: Decoder) -> Decoder:
        """Return the copy with the present weights of the divided decoder `model`, gathered one parameter after the
        other; all processes must call this together. Later calls change the same tensors, those of trainable
        parameters."""
        copy: Any = self.copy
        new = copy.embed.weight.is_meta
        if new:
            copy.to_empty(device=model.device)
        own = dict(copy.named_parameters())
        for name, parameter in model.named_parameters():
            if new or parameter.requires_grad:
                own[name].copy_(gathered(parameter))
        for name, buffer in model.named_buffers():
            owner, _, leaf = name.rpartition(".")
            setattr(copy.get_submodule(owner), leaf, buffer)
        return self.copy


def whole(model: Any) -> Decoder:
    """Return a decoder with the weights of `model` that this process can run alone: a copy, if `model` is divided into
    shards, or `model` itself. All processes of a divided model must call this together."""
    copy: WholeCopy | None = getattr(model, "whole_copy", None)
    return copy.of(model) if copy else model
