"""Softmax attention whose queries are multiplied by a factor that depends on their position.

Shapes: B batch, T tokens in this call, H heads, E d_head, F width of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onward.config.attention_options import LogScale, PowerScale, QueryScale
from onward.model.attention import Attend
from onward.model.context import AttentionContext
from onward.model.layer_cache import Keys


class QueryScaledAttend(Attend):
    """The attention `plain` with queries multiplied by a factor of their position, which `part` defines."""

    def __init__(self, part: QueryScale, plain: Attend) -> None:
        super().__init__(plain.scale, plain.dropout, plain.softcap)
        self.part, self.sinks = part, plain.sinks

    def forward(self, q: Tensor, k: Keys, v: Keys, context: AttentionContext) -> Tensor:
        return super().forward(self.scaled(q, context), k, v, context)

    def scaled(self, q: Tensor, context: AttentionContext) -> Tensor:
        positions = context.mask.query_positions.to(torch.promote_types(q.dtype, torch.float32))
        return q * query_scale(self.part, positions)[..., None, None].to(q.dtype)


def query_scale(part: QueryScale, positions: Tensor) -> Tensor:
    """Return the factors (B, T) of queries at positions (B, T), in the dtype of the positions."""
    match part:
        case LogScale():
            return 1 + part.weight * (1 + ((positions + part.offset) / part.original).floor()).log()
        case PowerScale():
            return (part.exponent * (1 + (positions + 1) / part.original).log()).exp()
    raise TypeError(type(part).__name__)
