"""Attention and feed-forward with a norm before their last projection (BitNet).

Shapes: B batch, T tokens, D d_model.
"""

from __future__ import annotations

from torch import Tensor

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.model.attention import SelfAttentionModule
from onward.model.context import AttentionContext
from onward.model.layers import GatedFeedForwardModule, NewNorm


class NormedAttentionModule(SelfAttentionModule):
    """Self-attention, x (B, T, D) -> (B, T, D), that normalizes the outputs of all heads together before the output
    projection."""

    def __init__(self, part: SelfAttention, config: DecoderConfig, norm: NewNorm) -> None:
        super().__init__(part, config, norm)
        self.out_norm = norm(self.n_heads * self.d_value)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        q, k, v = self.project(x)
        keys, values = context.update(k=context.rotate(k), v=v)
        y = self.attend(context.rotate(q), keys, values, context).flatten(-2)
        return self.dropout(self.out(self.out_norm(y)))


class NormedFeedForwardModule(GatedFeedForwardModule):
    """A feed-forward with a gate, x (..., D) -> (..., D), that normalizes its hidden units before the down
    projection."""

    def __init__(self, part: Gated, config: DecoderConfig, norm: NewNorm) -> None:
        width = part.width(config)
        super().__init__(config.d_model, width, part.act, part.bias, config.dropout)
        self.down_norm = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.down_norm(self.act(self.gate(x)) * self.up(x))))
