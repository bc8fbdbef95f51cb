"""Recurrent layers: their fast forms equal the published recurrence, written out token by token in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onward import GatedDeltaNet, Mamba2, ShortConvolution
from onward.model.build import build_attention
from onward.model.context import AttentionContext
from onward.model.mask import AttentionMask
from onward.model.recurrent.recurrence import Tokens, chunks, steps
from onward.model.segments import Segments

from support.decoders import assert_close, config

C = config(d_model=12, n_heads=2)


def conv(weights: list[Tensor], x: Tensor, biases: list[Tensor]) -> Tensor:
    """silu of a causal convolution of each channel of x (T, X)."""
    weight, bias = torch.cat(weights)[:, 0], torch.cat(biases) if biases else 0
    taps = weight.size(1)
    tap = lambda t, j: x[t - j] * weight[:, taps - 1 - j]
    rows = [torch.stack([tap(t, j) for j in range(min(taps, t + 1))]).sum(0) + bias for t in range(len(x))]
    return torch.stack(rows)


def gated_delta(m: Any, part: GatedDeltaNet, x: Tensor) -> Tensor:
    """Yang et al. 2024, equation 10, and Kimi Linear, equation 1, for a document x (T, D)."""
    (keys, values), (d_key, d_value) = part.counts(C), part.widths(C)
    mixed = conv([m.q_conv.weight, m.k_conv.weight, m.v_conv.weight], torch.cat([m.q(x), m.k(x), m.v(x)], -1), [])
    q, k, v = nn.functional.silu(mixed).split([keys * d_key, keys * d_key, values * d_value], -1)
    a, beta, z = m.a(x) + m.dt_bias, m.b(x).sigmoid() * (2 if part.negative else 1), m.z(x)
    rows = []
    state = torch.zeros(values, d_key, d_value, dtype=x.dtype)
    for t in range(len(x)):
        heads = []
        for h in range(values):
            g, columns = h * keys // values, slice(h * d_value, (h + 1) * d_value)
            key, query = (s[t, g * d_key : (g + 1) * d_key] for s in (k, q))
            key, query = (s / (s @ s + 1e-6).sqrt() for s in (key, query))
            rate = a[t].view(values, -1)[h].exp().log1p() * m.a_log[h].exp()
            decayed = torch.diag((-rate.expand(d_key)).exp()) @ state[h]
            state[h] = decayed + torch.outer(key, beta[t, h] * (v[t, columns] - key @ decayed))
            y = query @ state[h] / d_key**0.5
            y = y / (y.square().mean() + part.norm_eps).sqrt() * m.head_norm.weight
            heads.append(y * (z[t, columns].sigmoid() * (z[t, columns] if part.gate == "silu" else 1)))
        rows.append(torch.cat(heads))
    return m.out(torch.stack(rows))


def mamba2(m: Any, part: Mamba2, x: Tensor) -> Tensor:
    """Dao and Gu 2024, equation 16 and figure 6, for a document x (T, D)."""
    heads, groups, shared = part.count(C), part.n_groups, part.n_groups * part.d_state
    convs = [m.x_conv, m.b_conv, m.c_conv]
    biases = [one.bias for one in convs] if part.conv_bias else []
    mixed = conv([one.weight for one in convs], torch.cat([m.x(x), m.b(x), m.c(x)], -1), biases)
    inner, b, c = nn.functional.silu(mixed).split([heads * part.d_head, shared, shared], -1)
    dt, gate = (m.dt(x) + m.dt_bias).exp().log1p().clamp(min=part.step_min), nn.functional.silu(m.z(x))
    state, rows = torch.zeros(heads, part.d_head, part.d_state, dtype=x.dtype), []
    for t in range(len(x)):
        out = []
        for h in range(heads):
            g, values = h * groups // heads, inner[t, h * part.d_head : (h + 1) * part.d_head]
            inputs, reads = (s[t].view(groups, -1)[g] for s in (b, c))
            state[h] = (-m.a_log[h].exp() * dt[t, h]).exp() * state[h] + dt[t, h] * torch.outer(values, inputs)
            out.append(state[h] @ reads + m.d[h] * values)
        y = torch.cat(out) * (gate[t] if part.norm != "before_gate" else 1)
        if part.norm != "none":
            parts = [p / (p.square().mean() + part.norm_eps).sqrt() for p in y.view(groups, -1)]
            y = torch.cat(parts) * m.gate.weight
        rows.append(y * (gate[t] if part.norm == "before_gate" else 1))
    return m.out(torch.stack(rows))


def short(m: Any, part: ShortConvolution, x: Tensor) -> Tensor:
    return m.out(m.c(x) * conv([m.conv.weight], m.b(x) * m.x(x), [m.conv.bias] if part.bias else []))


PARTS = {
    "gated delta": (GatedDeltaNet(n_value_heads=6, d_key=5, d_value=4), gated_delta),
    "negative values": (GatedDeltaNet(negative=True, d_conv=2, norm_eps=0.1), gated_delta),
    "kimi delta": (GatedDeltaNet(n_heads=3, d_key=7, decay="element", rank=2, gate="sigmoid"), gated_delta),
    "mamba2 in groups": (Mamba2(n_heads=6, d_head=4, n_groups=2, d_state=5), mamba2),
    "mamba2 with other norms": (Mamba2(n_heads=2, d_head=3, d_state=4, bias=True, norm="before_gate"), mamba2),
    "mamba2 without a norm": (Mamba2(n_heads=2, d_head=3, conv_bias=False, norm="none", step_min=0.5), mamba2),
    "short convolution": (ShortConvolution(bias=True), short),
}


def context(positions: Tensor) -> AttentionContext:
    return AttentionContext(AttentionMask(positions, positions, segments=Segments.of(positions)))


@pytest.mark.parametrize("name", PARTS)
@torch.no_grad()
def test_layer_computes_its_published_recurrence_in_each_document(name: str) -> None:
    part, reference = PARTS[name]
    torch.manual_seed(0)
    module = build_attention(part, C).double()
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.5)
    lengths = [70, 1, 2, 66]  # longer than a chunk, with document boundaries inside chunks
    x = torch.randn(1, sum(lengths), C.d_model, dtype=torch.float64)
    wanted = torch.cat([reference(module, part, piece) for piece in x[0].split(lengths)])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    assert_close(module(x, context(positions))[0], wanted, 1e-10)


@pytest.mark.parametrize("decay", [1, 4], ids=["a decay for each head", "a decay for each element"])
@pytest.mark.parametrize("corrects", [True, False])
def test_chunks_have_the_results_and_gradients_of_steps(decay: int, corrects: bool) -> None:
    def inputs() -> tuple[Tokens, Tensor]:
        torch.manual_seed(0)
        d: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
        length = 150
        q, k = (torch.randn(2, 2, 1, length, 4, **d) for _ in range(2))
        v, rate = torch.randn(2, 2, 3, length, 5, **d), torch.randn(2, 2, 3, length, decay, **d)
        beta = torch.rand(2, 2, 3, length, 1, **d) if corrects else None
        return Tokens(q, nn.functional.normalize(k, dim=-1), v, -rate.square(), beta), torch.randn(2, 2, 3, 4, 5, **d)

    found = []
    for form in chunks, steps:
        tokens, state = inputs()
        leaves = [state, *tokens.each().values()]
        outputs, states = form(tokens, state)
        final = states if form is chunks else states[:, -1]
        loss = (outputs.sin().sum() + final.cos().sum()) / 100
        found.append([outputs, final, *torch.autograd.grad(loss, leaves)])
    for fast, slow in zip(*found):
        assert_close(fast, slow, 1e-10)
