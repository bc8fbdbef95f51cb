"""The layers with a state from which decoders are built: Gated DeltaNet, Mamba-2 and the short convolution.

Shapes: B rows, T tokens, D d_model, H heads; G, R, E and F as in `recurrence.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.config.decoder import DecoderConfig, GatedDeltaNet, Mamba2, ShortConvolution
from onward.model.activations import Activation, Child, Declarations, Input, Output
from onward.model.context import AttentionContext
from onward.model.layers import Linear, RMSNormModule, outputs_of
from onward.model.recurrent.carried import Carried, Convolution, Recurrence, convolve
from onward.model.recurrent.recurrence import Tokens


def exact(x: Tensor) -> Tensor:
    """Return x in the dtype of states, at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def by_head(x: Tensor, groups: int) -> Tensor:
    """Reorder x (B, T, H, width) to (B, G, R, T, width), where H = G R."""
    return x.unflatten(2, (groups, -1)).movedim(1, 3)


class GatedDeltaNetModule(nn.Module):
    """Gated DeltaNet and Kimi Delta Attention, x (B, T, D) -> (B, T, D)."""

    def __init__(self, part: GatedDeltaNet, config: DecoderConfig) -> None:
        super().__init__()
        (self.keys, self.values), (self.d_key, self.d_value) = part.counts(config), part.widths(config)
        width, key, value = config.d_model, self.keys * self.d_key, self.values * self.d_value
        decays = self.values * (self.d_key if part.decay == "element" else 1)
        self.q = Linear(width, key, bias=False)
        self.k = Linear(width, key, bias=False)
        self.v = Linear(width, value, bias=False)
        self.z = projection(width, value, part.rank)
        self.a = projection(width, decays, part.rank)
        self.b = Linear(width, self.values, bias=False)
        self.q_conv, self.k_conv, self.v_conv = (Convolution(n, part.d_conv, bias=False) for n in (key, key, value))
        self.a_log = nn.Parameter(torch.zeros(self.values))
        self.dt_bias = nn.Parameter(torch.zeros(decays))
        self.strength = 2.0 if part.negative else 1.0
        self.recurrence = Recurrence()
        self.head_norm = RMSNormModule(self.d_value, part.norm_eps)
        self.act: nn.Module = nn.SiLU() if part.gate == "silu" else nn.Sigmoid()
        self.out = Linear(value, width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        carried = Carried.of(context)
        *qkv, z, a, b = outputs_of((self.q, self.k, self.v, self.z, self.a, self.b), x)
        mixed = F.silu(convolve(torch.cat(qkv, -1), [self.q_conv, self.k_conv, self.v_conv], carried))
        q, k, v = (
            by_head(part.unflatten(-1, (-1, width)), self.keys)
            for part, width in zip(mixed.split([t.size(-1) for t in qkv], -1), (self.d_key, self.d_key, self.d_value))
        )
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        rate = F.softplus(exact(a) + exact(self.dt_bias)).unflatten(-1, (self.values, -1))
        decay = by_head(-exact(self.a_log).exp()[:, None] * rate, self.keys)
        beta = by_head(exact(b).sigmoid()[..., None] * self.strength, self.keys)
        y = self.recurrence(Tokens(q * self.d_key**-0.5, k, v * beta, decay, beta), carried)
        y = self.head_norm(y).type_as(x) * self.act(z.unflatten(-1, (self.values, -1)))
        return self.dropout(self.out(y.flatten(-2)))

    def activations(self) -> Declarations:
        heads, state = ("B", "T", self.values, self.d_value), ("B", self.values, self.d_key, self.d_value)
        return {
            "q": Activation(Output("q", heads=self.keys), ("B", "T", self.keys, self.d_key), 2),
            "k": Activation(Output("k", heads=self.keys), ("B", "T", self.keys, self.d_key), 2),
            "v": Activation(Output("v", heads=self.values), heads, 2),
            "gate": Activation(Output("z", heads=self.values), heads, 2),
            "strength": Activation(Output("b"), ("B", "T", self.values), 2),
            "reads": Activation(Output("recurrence"), heads, 2),
            "state": Activation(Output("recurrence.last"), state, 1, editable=False),
            "heads": Activation(Input("out", heads=self.values), heads, 2),
        }


def projection(width: int, outputs: int, rank: int) -> nn.Module:
    """A linear layer without a bias or, with a `rank`, the product of two."""
    if not rank:
        return Linear(width, outputs, bias=False)
    return nn.Sequential(Linear(width, rank, bias=False), Linear(rank, outputs, bias=False))


class Mamba2Module(nn.Module):
    """Mamba-2, x (B, T, D) -> (B, T, D); G is the number of groups, E d_state, F d_head."""

    def __init__(self, part: Mamba2, config: DecoderConfig) -> None:
        super().__init__()
        self.part, self.n_heads, self.state = part, part.count(config), (part.d_state, part.d_head)
        width, inner, shared = config.d_model, self.n_heads * part.d_head, part.n_groups * part.d_state
        self.z = Linear(width, inner, bias=part.bias)
        self.x = Linear(width, inner, bias=part.bias)
        self.b = Linear(width, shared, bias=part.bias)
        self.c = Linear(width, shared, bias=part.bias)
        self.dt = Linear(width, self.n_heads, bias=part.bias)
        self.x_conv, self.b_conv, self.c_conv = (
            Convolution(n, part.d_conv, part.conv_bias) for n in (inner, shared, shared)
        )
        self.a_log = nn.Parameter(torch.zeros(self.n_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.n_heads))
        self.d = nn.Parameter(torch.ones(self.n_heads))
        self.recurrence = Recurrence()
        gated = {"after_gate": GatedNorm, "before_gate": NormBeforeGate, "none": Gate}[part.norm]
        self.gate = gated(inner, part.n_groups, part.norm_eps)
        self.out = Linear(inner, width, bias=part.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        carried, groups = Carried.of(context), self.part.n_groups
        z, *xbc, dt = self.projected(x)
        mixed = F.silu(convolve(torch.cat(xbc, -1), [self.x_conv, self.b_conv, self.c_conv], carried))
        inner, b, c = mixed.split([t.size(-1) for t in xbc], -1)
        inner = inner.unflatten(-1, (self.n_heads, -1))
        step = F.softplus(exact(dt) + exact(self.dt_bias)).clamp(min=self.part.step_min)
        step = by_head(step[..., None], groups)
        decay = step * -exact(self.a_log).exp().view(groups, -1, 1, 1)
        k, q = (by_head(t.unflatten(-1, (groups, -1)), groups) for t in (b, c))
        y = self.recurrence(Tokens(q, k, by_head(inner, groups) * step, decay), carried)
        y = (y + exact(self.d)[:, None] * inner).flatten(-2)
        return self.dropout(self.out(self.gate(y, z).type_as(x)))

    def projected(self, x: Tensor) -> Sequence[Tensor]:
        return outputs_of((self.z, self.x, self.b, self.c, self.dt), x)

    def activations(self) -> Declarations:
        heads = "B", "T", self.n_heads, self.part.d_head
        return {
            "x": Activation(Output("x", heads=self.n_heads), heads, 2),
            "gate": Activation(Output("z", heads=self.n_heads), heads, 2),
            "step": Activation(Output("dt"), ("B", "T", self.n_heads), 2),
            "reads": Activation(Output("recurrence"), heads, 2),
            "state": Activation(Output("recurrence.last"), ("B", self.n_heads, *self.state), 1, editable=False),
            "heads": Activation(Input("out", heads=self.n_heads), heads, 2),
        }


class ScaledMamba2Module(Mamba2Module):
    """Mamba-2 with a factor for each of its projections."""

    def projected(self, x: Tensor) -> Sequence[Tensor]:
        return [y * scale for y, scale in zip(super().projected(x), self.part.scales)]


class AttentionAndMamba2Module(nn.Module):
    """The sum of self-attention and `scale` times Mamba-2, x (B, T, D) -> (B, T, D)."""

    def __init__(self, attention: nn.Module, mamba: nn.Module, scale: float) -> None:
        super().__init__()
        self.attention, self.mamba, self.scale = attention, mamba, scale

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.attention(x, context) + self.mamba(x, context) * self.scale  # type: ignore[no-any-return]

    def activations(self) -> Declarations:
        return {"attention": Child("attention"), "mamba": Child("mamba")}


class Gate(nn.Module):
    """The gated output of Mamba-2 without a norm: y * silu(z), both (B, T, width)."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        return y * F.silu(exact(z))


class GatedNorm(Gate):
    """RMSNorm in groups of y * silu(z)."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__(width, groups, eps)
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        return self.norm(super().forward(y, z))

    def norm(self, y: Tensor) -> Tensor:
        y = y.unflatten(-1, (self.groups, -1))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.flatten(-2) * self.weight


class NormBeforeGate(GatedNorm):
    """RMSNorm in groups of y, times silu(z)."""

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        return Gate.forward(self, self.norm(y), z)


class ShortConvolutionModule(nn.Module):
    """out(c * conv(b * x)), x (B, T, D) -> (B, T, D)."""

    def __init__(self, part: ShortConvolution, config: DecoderConfig) -> None:
        super().__init__()
        width = config.d_model
        self.b, self.c, self.x = (Linear(width, width, bias=part.bias) for _ in range(3))
        self.conv = Convolution(width, part.d_conv, part.bias)
        self.out = Linear(width, width, bias=part.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        b, c, x = outputs_of((self.b, self.c, self.x), x)
        return self.dropout(self.out(c * convolve(b * x, [self.conv], Carried.of(context)).type_as(c)))

    def activations(self) -> Declarations:
        channels = "B", "T", self.out.in_features
        steps = {"b": Output("b"), "c": Output("c"), "x": Output("x"), "post": Input("out")}
        return {name: Activation(where, channels, 2) for name, where in steps.items()}
