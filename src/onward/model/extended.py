"""Self-attention with options that few decoders have. Plain self-attention has none of these steps (`attention.py`).

Shapes: B batch, T tokens in this call, D d_model, H heads, K key/value heads, E d_head, F width of a value.
"""

from __future__ import annotations

from torch import Tensor, nn

from onward.config.decoder import DecoderConfig, SelfAttention
from onward.model.attention import SelfAttentionModule
from onward.model.layers import NewNorm
from onward.model.scales import Scale


def is_extended(part: SelfAttention) -> bool:
    """Return whether a layer with this part has steps that plain self-attention does not have."""
    return part.value_scale != 1.0


class ExtendedSelfAttentionModule(SelfAttentionModule):
    """Self-attention with scaled values. The arguments are those of SelfAttentionModule."""

    def __init__(self, part: SelfAttention, config: DecoderConfig, norm: NewNorm) -> None:
        super().__init__(part, config, norm)
        self.value_scale: nn.Module = Scale(part.value_scale) if part.value_scale != 1.0 else nn.Identity()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return q, k, self.value_scale(v)
