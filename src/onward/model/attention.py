"""Self-attention, in methods that a subclass may override one by one.

Shapes: B batch, T tokens in this call, S keys, D d_model, H heads, K key/value heads, E d_head, F width of a value.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from onward.config.decoder import DecoderConfig, SelfAttention
from onward.model.activations import Activation, Child, ContextVectors, Declarations, Queries, attention, output
from onward.model.backends import attend
from onward.model.cache import Keys
from onward.model.context import AttentionContext
from onward.model.linear import Linear, outputs_of
from onward.model.norms import HeadNorms, NewNorm


class Attend(nn.Module):
    """Softmax attention, the function `backends.attend` as a module, so that forward hooks can reach its queries, keys
    and values.

    `scale` multiplies the scores, `dropout` is the rate for the attention weights in training, `softcap` caps the
    scores (None: no cap), and `sinks` is the number of learned sink scores: one per head, or 0 for none.
    """

    def __init__(self, scale: float, dropout: float, softcap: float | None = None, sinks: int = 0) -> None:
        super().__init__()
        self.scale, self.dropout, self.softcap = scale, dropout, softcap
        self.sinks = nn.Parameter(torch.zeros(sinks)) if sinks else None

    def forward(self, q: Tensor, k: Keys, v: Keys, context: AttentionContext) -> Tensor:
        """Compute attention with queries (B, T, H, E), keys (B, S, K, E) and values (B, S, K, F), under the mask in
        `context`; return (B, T, H, F).

        Keys and values are tensors, or entries of the KV cache.
        """
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, context.mask, scale=self.scale, softcap=self.softcap, sinks=self.sinks, dropout=dropout)


class SelfAttentionModule(nn.Module):
    """Self-attention, x (B, T, D) -> (B, T, D): project to queries, keys and values, attend, project back.

    `part` is the attention part of the config; `norm` is a function from a width to a new norm, for norms of queries
    and keys.
    """

    def __init__(self, part: SelfAttention, config: DecoderConfig, norm: NewNorm) -> None:
        super().__init__()
        self.d_head, self.n_heads, self.n_kv_heads = config.d_head, config.n_heads, config.n_kv_heads
        q_width, kv_width = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.q = Linear(config.d_model, q_width, bias=part.bias)
        self.k = Linear(config.d_model, kv_width, bias=part.bias)
        self.v = Linear(config.d_model, kv_width, bias=part.bias)
        self.clip: nn.Module = nn.Hardtanh(-part.clip, part.clip) if part.clip else nn.Identity()
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        # a norm of q or k is over the last dimension of (B, T, groups, q_group or k_group)
        self.q_group, self.k_group = (q_width, kv_width) if part.qk_norm == "width" else (self.d_head, self.d_head)
        if part.qk_norm == "heads":
            self.q_norm = HeadNorms(norm(self.d_head) for _ in range(config.n_heads))
            self.k_norm = HeadNorms(norm(self.d_head) for _ in range(config.n_kv_heads))
        elif part.qk_norm != "none":
            self.q_norm = norm(self.q_group)
            self.k_norm = norm(self.k_group)
        scale = self.d_head**-0.5 if part.scale is None else part.scale
        self.attend = Attend(scale, config.dropout, part.attn_softcap, config.n_heads if part.sinks else 0)
        self.out: nn.Module = Linear(q_width, config.d_model, bias=part.out_bias) if part.out else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        q, k, v = self.project(x)
        keys, values = context.update(k=context.rotate(k), v=v)
        return self.dropout(self.out(self.attend(context.rotate(q), keys, values, context).flatten(-2)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, H, E), keys and values (B, T, K, E) of x (B, T, D), before any rotation."""
        heads = (*x.shape[:2], -1, self.d_head)
        q, k, v = map(self.clip, outputs_of((self.q, self.k, self.v), x))
        q = self.q_norm(q.unflatten(-1, (-1, self.q_group))).view(heads)
        k = self.k_norm(k.unflatten(-1, (-1, self.k_group))).view(heads)
        return q, k, v.view(heads)

    def activations(self) -> Declarations:
        vectors = ContextVectors(("k", "q"), {"k": "k_rotated", "v": "v"})
        q, k = (("B", "T", heads, self.d_head) for heads in (self.n_heads, self.n_kv_heads))
        q_groups, k_groups = self.n_heads * self.d_head // self.q_group, self.n_kv_heads * self.d_head // self.k_group
        return {
            "q_norm": Child("q_norm", (q_groups,), default=partial(output, self.q_group)),
            "k_norm": Child("k_norm", (k_groups,), default=partial(output, self.k_group)),
            "k": Activation(vectors, k, 2),
            "q": Activation(vectors, q, 2),
            "k_rotated": Activation(vectors, k, 2, rotary=True),
            "v": Activation(vectors, k, 2),
            "q_rotated": Activation(Queries(), q, 2, rotary=True),
            **attention(self.n_heads, self.d_head),
        }
