"""Self-attention, and Attend: the one place that chooses how it is computed.

Shapes: B batch, T tokens in this call, S tokens that can be seen, H heads, K key/value heads, E d_head.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.model.cache import View
from onward.model.config import DecoderConfig, SelfAttention, at
from onward.model.norms import HeadNorms
from onward.model.positions import rotate


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    cap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """How much each token reads from each other, (B, H, T, S), for q (B, T, H, E) and k (B, S, K, E), written out.

    `bias` (B, 1 or H, T, S) is added to the scores, -inf where a token does not see another; None stands for the plain
    causal mask. `sinks` (H,) are scores that take part in the softmax and are then left out. The softmax is computed in
    at least fp32 and rounded once.
    """
    if bias is None:
        bias = q.new_full((q.size(1), k.size(1)), -math.inf).triu(1)
    k = k.permute(0, 2, 3, 1)  # (B, K, E, S)
    folded = (q * scale).unflatten(2, (k.size(1), -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (B, K, H / K * T, E)
    scores = (folded @ k).view(q.size(0), q.size(2), q.size(1), k.size(-1))
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores + bias.type_as(scores)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.type_as(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


class Attend(nn.Module):
    """Softmax attention over what a view lets each token see. A module of its own so that it can be watched.

    Written out it is the reference; the fused kernel is taken where it computes the same thing faster.
    """

    def __init__(self, scale: float, dropout: float, cap: float | None = None, sinks: int = 0) -> None:
        super().__init__()
        self.scale, self.dropout, self.cap = scale, dropout, cap
        self.sinks = nn.Parameter(torch.zeros(sinks)) if sinks else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        """q (B, T, H, E) and the keys (B, S, K, E) and values (B, S, K, F) they may see -> (B, T, H, F)."""
        fused = self.cap is None and self.sinks is None and not written_out_is_faster(q, k)
        return (self.fused if fused else self.written_out)(q, k, v, view)

    def written_out(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        """The reference: every step in the open."""
        with torch.autocast(q.device.type, enabled=False):
            weights = F.dropout(self.weights(q, k, view), self.dropout, self.training)
            v = v.transpose(1, 2)  # (B, K, S, E)
            y = weights.unflatten(1, (v.size(1), -1)).flatten(2, 3) @ v  # a group of query heads shares its values
            return y.view(q.size(0), q.size(2), q.size(1), v.size(-1)).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor, view: View) -> Tensor:
        """The attention weights (B, H, T, S)."""
        return attention_weights(q, k, scale=self.scale, cap=self.cap, bias=view.bias, sinks=self.sinks)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        """The same through torch's fused kernel."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        bias = None if view.bias is None else view.bias.type_as(q)
        dropout = self.dropout if self.training else 0.0
        grouped = q.size(1) != k.size(1)
        y = F.scaled_dot_product_attention(
            q, k, v, bias, dropout, is_causal=bias is None, scale=self.scale, enable_gqa=grouped
        )
        return y.transpose(1, 2)


def written_out_is_faster(q: Tensor, k: Tensor) -> bool:
    """Training in bf16 on a CPU over short contexts: its fused backward is slower than plain matrix products."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.requires_grad and k.size(1) <= 512


class SelfAttentionModule(nn.Module):
    """Project to queries, keys and values, attend, project back: x (B, T, D) -> (B, T, D)."""

    def __init__(self, part: SelfAttention, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.d_head = config.d_head
        wide, narrow = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.q = nn.Linear(config.d_model, wide, bias=part.bias)
        self.k = nn.Linear(config.d_model, narrow, bias=part.bias)
        self.v = nn.Linear(config.d_model, narrow, bias=part.bias)
        self.clip: nn.Module = nn.Hardtanh(-part.clip, part.clip) if part.clip else nn.Identity()
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.q_group, self.k_group = (wide, narrow) if part.qk_norm == "width" else (self.d_head, self.d_head)
        norm = at(config.norm, layer)
        if part.qk_norm == "heads":
            self.q_norm = HeadNorms(norm.build(config, layer, self.d_head) for _ in range(config.n_heads))
            self.k_norm = HeadNorms(norm.build(config, layer, self.d_head) for _ in range(config.n_kv_heads))
        elif part.qk_norm != "none":
            self.q_norm = norm.build(config, layer, self.q_group)
            self.k_norm = norm.build(config, layer, self.k_group)
        scale = self.d_head**-0.5 if part.scale is None else part.scale
        self.attend = Attend(scale, config.dropout, part.attn_softcap, config.n_heads if part.sinks else 0)
        self.out: nn.Module = nn.Linear(wide, config.d_model, bias=part.out_bias) if part.out else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, view: View) -> Tensor:
        heads = (*x.shape[:2], -1, self.d_head)
        q = self.q_norm(self.clip(self.q(x)).unflatten(-1, (-1, self.q_group))).view(heads)
        k = self.k_norm(self.clip(self.k(x)).unflatten(-1, (-1, self.k_group))).view(heads)
        v = self.clip(self.v(x)).view(heads)
        if view.rotation:
            q, k = rotate(q, *view.rotation), rotate(k, *view.rotation)
        k, v = view.remember(k=k, v=v)
        return self.dropout(self.out(self.attend(q, k, v, view).flatten(-2)))
