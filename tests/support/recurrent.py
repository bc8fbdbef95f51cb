"""The simplest layer with a state, for tests of the cache: a decaying sum of past tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onward import DecoderConfig, SelfAttention
from onward.config.part_types import Attention, ConfigFields, States
from onward.model.context import AttentionContext
from onward.model.layers import Linear
from onward.model.states import StateLayerCache, StateSlots

from support.decoders import config


@dataclass(frozen=True)
class Fading(Attention, kind="fading"):
    """A layer with the state s = 0.5 s + W x after each token; it returns a projection of s."""

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        return {}

    def states(self, config: ConfigFields) -> States:
        return {"sum": ((config.d_model,), "float32")}

    def build(self, config: ConfigFields, layer: int) -> nn.Module:  # type: ignore[override]
        return FadingModule(config.d_model)


class FadingModule(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside, self.out = Linear(width, width, bias=False), Linear(width, width, bias=False)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        added, after = self.inside(x), list[Tensor]()
        cache, slots = context.cache, context.indices
        state = added.new_zeros(len(x), x.size(-1))
        if isinstance(cache, StateLayerCache) and isinstance(slots, StateSlots):
            state = cache.read("sum", slots.states)
        for t in range(x.size(1)):
            begins = (context.mask.query_positions[:, t] == 0)[:, None]
            state = torch.where(begins, 0.0, state) * 0.5 + added[:, t]
            after.append(state)
        states = torch.stack(after, 1)
        if isinstance(cache, StateLayerCache) and isinstance(slots, StateSlots):
            columns = slots.states.columns.clamp(min=0)
            cache.write("sum", states[slots.states.rows, columns], slots.states)
        return self.out(states.to(x.dtype))

    def activations(self) -> dict[str, Any]:
        return {}


def fading(**changes: Any) -> DecoderConfig:
    """A decoder in which every other layer has a state instead of keys; the first of the other two layers has a
    window."""
    return config(n_layers=4, attention=(Fading(), SelfAttention(window=3), Fading(), SelfAttention()), **changes)
