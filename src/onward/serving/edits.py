"""Edits of a model that belong to one request: heads and layers that are switched off for its rows only."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from onward.config.decoder import at
from onward.generation.request import Request
from onward.model.decoder import Decoder
from onward.model.rows import ROWS
from onward.serving.errors import ApiError
from onward.serving.shapes import Whole
from onward.tracing.calls import Location
from onward.tracing.edit import Change, edit
from onward.tracing.sites import activations

MOST_OFF = 4096  # largest number of heads, and of layers, of a request


class Edits(BaseModel):
    """The attention heads, as [layer, head], and the layers that are switched off for a request: their contribution to
    the residual stream is 0."""

    model_config = ConfigDict(extra="allow")

    heads: Annotated[list[tuple[Whole, Whole]], Field(max_length=MOST_OFF)] = []
    layers: Annotated[list[Whole], Field(max_length=MOST_OFF)] = []

    def names(self, model: Decoder) -> list[str]:
        """Names of the activations that become 0; raises an ApiError for a head or layer that the model lacks."""
        n_layers = model.config.n_layers
        for layer in (*self.layers, *(layer for layer, _ in self.heads)):
            if not 0 <= layer < n_layers:
                raise ApiError(
                    f"Cannot apply edits to layer {layer}: the model has layers 0 to {n_layers - 1}", param="edits"
                )
        for layer, head in self.heads:
            n_heads = at(model.config.attention, layer).heads(model.config).n_heads
            if not 0 <= head < n_heads:
                raise ApiError(
                    f"Cannot apply edits to head {head}: layer {layer} has heads 0 to {n_heads - 1}", param="edits"
                )
        known = activations(model)
        parts = [f"blocks.{layer}.{part}.out" for layer in self.layers for part in ("attn", "mlp")]
        # also the heads of these layers, so that whatever reads them gets 0
        parts += [f"blocks.{layer}.attn.heads" for layer in self.layers]
        heads = [f"blocks.{layer}.attn.heads.{head}" for layer, head in self.heads if layer not in self.layers]
        return [*heads, *(name for name in parts if name in known)]


def edited_for(model: Decoder, names: Collection[str], requests: Collection[Request]) -> AbstractContextManager[None]:
    """A context manager under which the activations `names` are 0 in the batch rows of the engine's `requests`
    alone."""

    def zeroed(x: Tensor, _: Location) -> Tensor:
        rows = ROWS.get()
        own = [row.request in requests for row in rows]
        if not any(own):
            return x
        mask = torch.tensor(own, device=x.device).view(-1, *[1] * (x.dim() - 1))
        return torch.where(mask, torch.zeros_like(x), x)

    return edit(model, dict.fromkeys(names, Change(zeroed)))
