"""Attention equals a formula written in plain loops; position encodings follow the formulas of their papers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from onward import Alibi, Decoder, DecoderConfig, LogScale, PowerScale, Rotary, SelfAttention, Sinusoidal
from onward.config.decoder import at
from onward.kernels.operations import rotate
from onward.model import SinusoidalPositionModule, mask
from onward.model.alibi import alibi_slopes
from onward.model.attention import Attend
from onward.model.context import attention_contexts, rotary
from onward.model.reference import attention_weights

from support.decoders import DECODERS, assert_close
from support.devices import on_device

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 0, 1, 2, 0, 1]])  # the second row is packed

HORIZON = torch.tensor([[[10]]])  # no effect without RoPE scaling


def in_plain_loops(config: DecoderConfig, layer: int, q: Tensor, k: Tensor, sinks: list[float] | None) -> Tensor:
    """The attention weights (B, H, T, S), computed element by element."""
    attention: Any = at(config.attention, layer)
    position = at(config.position, layer)
    rows, tokens, heads, width = q.shape
    # ALiBi slopes as powers of 1/2; with a power of two of heads, the last is 8
    powers = {3: [4, 8, 2], 6: [2, 4, 6, 8, 1, 3]}.get(heads)
    scale = 1 / math.sqrt(width) if attention.scale is None else attention.scale
    weights = torch.zeros(rows, heads, tokens, tokens, dtype=torch.float64)
    for b in range(rows):
        where = POSITIONS[b].tolist()
        for h in range(heads):
            keys = k[b, :, h * k.size(2) // heads]
            for i in range(tokens):
                begin = max(j for j in range(i + 1) if where[j] == 0)  # start of the document
                if attention.window:
                    back = where[i] % attention.window if attention.chunked else attention.window - 1
                    begin = max(begin, i - back)
                match attention.query_scale:
                    case LogScale(weight, original, offset):
                        factor = 1 + weight * math.log(1 + (where[i] + offset) // original)
                    case PowerScale(exponent, original):
                        factor = math.exp(exponent * math.log1p((where[i] + 1) / original))
                    case None:
                        factor = 1.0
                exponentials = {}
                for j in range(begin, i + 1):
                    score = factor * scale * sum(x * y for x, y in zip(q[b, i, h].tolist(), keys[j].tolist()))
                    if attention.attn_softcap:
                        score = attention.attn_softcap * math.tanh(score / attention.attn_softcap)
                    if isinstance(position, Alibi):
                        score -= 2 ** (-position.steepness / 8 * powers[h]) * (i - j)  # type: ignore[index]
                    exponentials[j] = math.exp(score)
                total = sum(exponentials.values()) + (math.exp(sinks[h]) if sinks else 0)
                for j, e in exponentials.items():
                    weights[b, h, i, j] = e / total
    return weights


LAYERS = [
    (name, layer)
    for name, config in DECODERS.items()
    for layer in range(config.n_layers)
    if isinstance(at(config.attention, layer), SelfAttention)
]


@torch.inference_mode()
def assert_equals_plain_loops(name: str, layer: int) -> None:
    config = DECODERS[name]
    torch.manual_seed(2)
    attend: Any = on_device(Decoder(config).double()).blocks[layer].attn.attend
    sinks = None if attend.sinks is None else attend.sinks.normal_().tolist()
    n_heads, n_kv_heads, d_head, d_value = at(config.attention, layer).heads(config)
    shapes = (n_heads, d_head), (n_kv_heads, d_head), (n_kv_heads, d_value)
    q, k, v = (torch.randn(2, 9, *shape, dtype=torch.float64) for shape in shapes)
    seen = attention_contexts(config, q.dtype, POSITIONS, None, plain=False)[layer]
    weights = in_plain_loops(config, layer, q, k, sinks)
    wanted = torch.einsum("bhts,bshe->bthe", weights, v.repeat_interleave(n_heads // n_kv_heads, 2))
    bias = seen.mask.dense(q.dtype)
    got = attention_weights(
        attend.scaled(q, seen), k, scale=attend.scale, softcap=attend.softcap, bias=bias, sinks=attend.sinks
    )
    assert_close(got, weights, 1e-10)
    assert_close(attend(q, k, v, seen), wanted, 1e-10)


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_attention_equals_plain_loops(name: str, layer: int) -> None:
    assert_equals_plain_loops(name, layer)


@pytest.mark.parametrize("by", [1, -1])
def test_loop_proof_notices_a_window_off_by_one(by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mask.visible
    monkeypatch.setattr(mask, "visible", lambda q, k, window: right(q, k, window + by if window else 0))
    with pytest.raises(AssertionError):
        assert_equals_plain_loops("gemma2", 0)


def test_loop_proof_notices_wrong_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Attend.forward
    monkeypatch.setattr(Attend, "forward", lambda self, q, k, v, context: right(self, q, k.flip(2), v, context))
    with pytest.raises(AssertionError):
        assert_equals_plain_loops("llama", 0)


def test_attention_weights_sum_to_one_and_are_causal() -> None:
    q, k = torch.randn(2, 5, 6, 4), torch.randn(2, 5, 3, 4)
    weights = attention_weights(q, k, scale=0.5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 5))
    assert torch.equal(weights.triu(1), torch.zeros_like(weights))
    assert (attention_weights(q, k, scale=0.5, sinks=torch.zeros(6)).sum(-1) < 1).all()


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 20])
def test_alibi_slopes_are_those_of_the_paper(heads: int) -> None:
    def powers(n: int) -> list[float]:
        return [2 ** (-8 * (h + 1) / n) for h in range(n)]

    closest = 2 ** int(math.log2(heads))
    wanted = powers(closest) + powers(2 * closest)[::2][: heads - closest]
    assert alibi_slopes(heads).tolist() == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotary_scores_depend_on_the_distance_only(fraction: float) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    part = Rotary(fraction=fraction)

    def score(i: int, j: int) -> float:
        turned = [rotate(x, *rotary(part, 8, torch.tensor([[p]]).double(), HORIZON)) for x, p in ((q, i), (k, j))]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(103, 100), abs=1e-12)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)
    turning = int(8 * fraction)
    assert torch.equal(rotate(q, *rotary(part, 8, torch.tensor([[7]]), HORIZON))[..., turning:], q[..., turning:])


def test_sinusoidal_positions_are_those_of_the_paper() -> None:
    got = SinusoidalPositionModule(6, Sinusoidal())(torch.tensor([[0, 3]]), torch.float64)[0, 1].tolist()
    wanted = [f(3 / 10_000 ** (2 * i / 6)) for i in range(3) for f in (math.sin, math.cos)]
    assert got == pytest.approx(wanted, abs=1e-14)
