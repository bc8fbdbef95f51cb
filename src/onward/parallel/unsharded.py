"""An unsharded copy of a sharded decoder in each process, for the generation engine of the process.

Engines need different numbers of forward passes, because their completions differ in length, so the processes cannot
gather the weights block by block in each pass. Instead, they gather all weights once, before generation.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from onward.model.decoder import Decoder
from onward.parallel.parts import gathered


class UnshardedCopy:
    """A copy of a decoder that is about to be sharded. The constructor copies the modules, and the first call of
    `gather` allocates the weights, in the dtype of the decoder."""

    def __init__(self, model: Decoder) -> None:
        outlines: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in model.parameters()
        }
        self.copy = deepcopy(model, outlines).eval()

    @torch.no_grad()
    def gather(self, model: Decoder) -> Decoder:
        """Gather the current weights of the sharded decoder `model` into the copy, one parameter at a time, and return
        the copy. Later calls change the same tensors, and gather trainable parameters only. All processes must call
        this together."""
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
