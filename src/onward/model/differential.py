"""Differential attention (Ye et al. 2024, arXiv:2410.05258).

Shapes: B batch, T tokens in this call, S keys, D d_model, H pairs of query heads, K pairs of key heads, E d_head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onward.config.decoder import DecoderConfig
from onward.config.differential_parts import DifferentialAttention
from onward.model.activations import Activation, Child, Declarations, Input, Output, Scores
from onward.model.attention import Attend
from onward.model.context import AttentionContext
from onward.model.layer_cache import Keys
from onward.model.layers import Linear, outputs_of


class HalfModule(nn.Module):
    """Softmax attention of one head of each pair: queries (B, T, H, E), keys (B, S, K, E) and values (B, S, K, 2 E) to
    (B, T, H, 2 E)."""

    def __init__(self, n_heads: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.attend = n_heads, Attend(scale, dropout)

    def forward(self, q: Tensor, k: Keys, v: Keys, context: AttentionContext) -> Tensor:
        return self.attend(q, k, v, context)  # type: ignore[no-any-return]

    def activations(self) -> Declarations:
        scores, shape = Scores(), ("B", self.n_heads, "T", "S")
        return {name: Activation(scores, shape, 1) for name in scores.names}


class DifferentialAttentionModule(nn.Module):
    """Differential attention, x (B, T, D) -> (B, T, D); `norm` normalizes the output of a pair of heads, (..., 2 E)."""

    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(self, part: DifferentialAttention, config: DecoderConfig, layer: int, norm: nn.Module) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d_head, self.d_value = part.heads(config)
        queries, keys = self.n_heads * self.d_value, self.n_kv_heads * self.d_value
        self.q = Linear(config.d_model, queries, bias=part.bias)
        self.k = Linear(config.d_model, keys, bias=part.bias)
        self.v = Linear(config.d_model, keys, bias=part.bias)
        self.first, self.second = (HalfModule(self.n_heads, self.d_head**-0.5, config.dropout) for _ in range(2))
        self.lambda_init = part.first_lambda(layer)
        for name in "q1", "k1", "q2", "k2":
            self.register_parameter(f"lambda_{name}", nn.Parameter(torch.zeros(self.d_head)))
        self.head_norm = norm
        self.out = Linear(queries, config.d_model, bias=part.out_bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        q, k, v = outputs_of((self.q, self.k, self.v), x)
        q1, q2 = self.halves(q, context)
        k1, k2 = self.halves(k, context)
        first, second, values = context.update(k1=k1, k2=k2, v=v.unflatten(-1, (-1, self.d_value)))
        subtracted = self.second(q2, second, values, context)
        y = self.first(q1, first, values, context) - self.factor().to(subtracted.dtype) * subtracted
        return self.dropout(self.out(self.head_norm(y).mul(1 - self.lambda_init).flatten(-2)))  # type: ignore[no-any-return]

    def halves(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, ...]:
        """Rotate the vectors (B, T, H * 2 E) of all heads; return those of the first and of the second head of each
        pair, (B, T, H, E)."""
        return context.rotate(x.unflatten(-1, (-1, self.d_head))).unflatten(2, (-1, 2)).unbind(3)

    def factor(self) -> Tensor:
        """lambda (1,), in at least fp32."""
        lambdas = (self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2)
        exact = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        added, taken = ((q.to(exact) * k.to(exact)).sum(-1, keepdim=True).exp() for q, k in lambdas)
        return added - taken + self.lambda_init  # type: ignore[no-any-return]

    def activations(self) -> Declarations:
        return {
            "first": Child("first"),
            "second": Child("second"),
            "heads": Activation(Input("out", heads=self.n_heads), ("B", "T", self.n_heads, self.d_value), 2),
            "v": Activation(Output("v", heads=self.n_kv_heads), ("B", "T", self.n_kv_heads, self.d_value), 2),
        }
