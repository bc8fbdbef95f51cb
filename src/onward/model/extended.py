"""Attention with steps that few decoders have. Plain attention has none of them (`attention.py`, `latent.py`).

Shapes: B batch, T tokens in this call, S keys, D d_model, H heads, K key/value heads, E d_head, F width of a value.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.config.attention_options import OutputGate, SoftplusGate
from onward.config.decoder import DecoderConfig, LatentAttention, NoNorm, SelfAttention, at
from onward.config.shared_keys import kv_users
from onward.model.activations import Activation, ContextVectors, Declarations, Output
from onward.model.attends import QueryScaledAttend
from onward.model.attention import SelfAttentionModule
from onward.model.context import AttentionContext
from onward.model.latent import LatentAttentionModule
from onward.model.layer_cache import Keys
from onward.model.layers import Linear, NewNorm, outputs_of
from onward.model.scales import Scale


def attention(
    part: SelfAttention | LatentAttention, config: DecoderConfig, layer: int, build_norm: NewNorm
) -> nn.Module:
    """Return the module of a layer's attention; `build_norm` makes norms from a part, the config, the layer and a
    width."""
    if isinstance(part, LatentAttention):
        latent = GatedLatentAttentionModule if part.gate else LatentAttentionModule
        module: Any = latent(part, config)
    else:
        norms = part.qk_norm_part or at(config.norm, layer), part.value_norm or NoNorm()
        module = self_attention(part, config, layer, *(partial(build_norm, norm, config, layer) for norm in norms))
    return with_query_scale(part, module)


def with_query_scale(part: SelfAttention | LatentAttention, module: Any) -> nn.Module:
    if part.query_scale:
        module.attend = QueryScaledAttend(part.query_scale, module.attend)
    return module  # type: ignore[no-any-return]


def self_attention(
    part: SelfAttention, config: DecoderConfig, layer: int, norm: NewNorm, value_norm: NewNorm
) -> nn.Module:
    shared_by = kv_users(config, layer)
    if part.shares_kv:
        kind: type[ExtendedSelfAttentionModule] = SharingSelfAttentionModule
    elif part.values_are_keys:
        kind = KeyValueSelfAttentionModule
    elif part.norm_rotated:
        kind = LateNormSelfAttentionModule
    elif part.gate or part.value_norm or part.value_scale != 1.0 or shared_by:
        kind = ExtendedSelfAttentionModule
    else:
        return SelfAttentionModule(part, config, norm)
    return kind(part, config, norm, value_norm, layer, shared_by)


class Gate(nn.Module):
    """Multiplies the outputs of heads (B, T, H, F) by the activation function of a projection of the attention's input,
    (B, T, H) or (B, T, H * F), computed in at least fp32."""

    def __init__(self, part: OutputGate) -> None:
        super().__init__()
        self.act = F.softplus if isinstance(part, SoftplusGate) else torch.sigmoid

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        gate = self.act(gate.to(torch.promote_types(gate.dtype, torch.float32)))
        return y * gate.to(y.dtype).unflatten(-1, (y.size(-2), -1))


class HeadBiasedGate(Gate):
    """A gate with a learned bias for each head, (H,), that is added to the projection's outputs for the head."""

    def __init__(self, part: OutputGate, n_heads: int) -> None:
        super().__init__(part)
        self.bias = nn.Parameter(torch.zeros(n_heads))

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        by_head = gate.unflatten(-1, (y.size(-2), -1)) + self.bias[:, None]
        return super().forward(y, by_head.flatten(-2))


class NoGate(nn.Module):
    """Returns the outputs of heads as they are."""

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        return y


def add_gate(module: Any, part: OutputGate | None, d_model: int, n_heads: int, d_value: int) -> None:
    """Add the submodules `gate`, the projection, and `gated`, which computes the product, to an attention module."""
    module.gate, module.gated = nn.Identity(), NoGate()
    if part:
        width = n_heads * (d_value if part.per == "element" else 1)
        module.gate = Linear(d_model, width, bias=part.bias)
        module.gated = HeadBiasedGate(part, n_heads) if part.head_bias else Gate(part)


def gate_activations(module: Any) -> Declarations:
    if isinstance(module.gated, NoGate):
        return {}
    return {"gate": Activation(Output("gate"), ("B", "T", module.gate.out_features))}


class ExtendedSelfAttentionModule(SelfAttentionModule):
    """Self-attention whose values may be scaled and normalized, whose heads' outputs may be gated, and whose keys and
    values the later layers `shared_by` may also use. `value_norm` makes the norm of the values from their width,
    `layer` is the number of the layer, and the other arguments are those of SelfAttentionModule."""

    gate: nn.Module
    gated: nn.Module

    def __init__(
        self,
        part: SelfAttention,
        config: DecoderConfig,
        norm: NewNorm,
        value_norm: NewNorm,
        layer: int,
        shared_by: list[int],
    ) -> None:
        super().__init__(part, config, norm)
        self.shared_by, self.layer = shared_by, layer
        self.v_norm = value_norm(self.d_value)
        self.value_scale: nn.Module = Scale(part.value_scale) if part.value_scale != 1.0 else nn.Identity()
        add_gate(self, part.gate, config.d_model, self.n_heads, self.d_value)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        y = self.attend(*self.vectors(x, context), context)
        return self.dropout(self.out(self.gated(y, self.gate(x)).flatten(-2)))

    def vectors(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Keys, Keys]:
        """Return the rotated queries (B, T, H, E) of x (B, T, D), and the keys (B, S, K, E) and values (B, S, K, F) to
        attend to."""
        q, k, v = self.project(x)
        keys, values = context.update(k=self.late_k_norm(context.rotate(k)), v=self.v_norm(self.value_scale(v)))
        for layer in self.shared_by:
            context.shared.of_layer[layer] = keys, values
        return self.late_q_norm(context.rotate(q)), keys, values

    def late_q_norm(self, q: Tensor) -> Tensor:
        return q

    def late_k_norm(self, k: Tensor) -> Tensor:
        return k

    def activations(self) -> Declarations:
        return super().activations() | gate_activations(self)


class LateNormSelfAttentionModule(ExtendedSelfAttentionModule):
    """ExtendedSelfAttentionModule whose queries and keys are normalized after their rotation."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.clip, outputs_of((self.q, self.k, self.v), x))
        q, k = (vectors.unflatten(-1, (-1, self.d_head)) for vectors in (q, k))
        return q, k, v.unflatten(-1, (-1, self.d_value))

    def late_q_norm(self, q: Tensor) -> Tensor:
        return self.q_norm(q)

    def late_k_norm(self, k: Tensor) -> Tensor:
        return self.k_norm(k)


class KeyValueSelfAttentionModule(ExtendedSelfAttentionModule):
    """ExtendedSelfAttentionModule whose values are the keys before their norm and their rotation."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        del self.v

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (y.unflatten(-1, (-1, self.d_head)) for y in map(self.clip, outputs_of((self.q, self.k), x)))
        return self.q_norm(q), self.k_norm(k), k


class SharingSelfAttentionModule(ExtendedSelfAttentionModule):
    """ExtendedSelfAttentionModule that uses the keys and values of an earlier layer."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        del self.k, self.v, self.k_norm

    def vectors(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Keys, Keys]:
        q = self.q_norm(self.clip(self.q(x)).unflatten(-1, (-1, self.d_head)))
        return context.rotate(q), *context.shared.of_layer[self.layer]

    def activations(self) -> Declarations:
        names, vectors = super().activations(), ContextVectors(("q",), {})
        own = {name: one for name, one in names.items() if name not in ("k", "v", "k_rotated", "k_norm")}
        return own | {"q": Activation(vectors, ("B", "T", self.n_heads, self.d_head), 2)}


class GatedLatentAttentionModule(LatentAttentionModule):
    """Latent attention whose heads' outputs are gated."""

    gate: nn.Module
    gated: nn.Module

    def __init__(self, part: LatentAttention, config: DecoderConfig) -> None:
        super().__init__(part, config)
        add_gate(self, part.gate, config.d_model, self.n_heads, part.d_value)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.dropout(self.out(self.gated(self.attended(x, context), self.gate(x)).flatten(-2)))

    def activations(self) -> Declarations:
        return super().activations() | gate_activations(self)
