"""Norms, softmax and rotary angles are computed in at least fp32, whatever the precision of the weights."""

import pytest
import torch
from torch import Tensor

from onward import DecoderConfig, LayerNorm, RMSNorm, Rotary
from onward.kernels.operations import rotate
from onward.model import build_norm
from onward.model.context import rotary
from onward.model.reference import attention_weights
from onward.model.scales import Scale

from support.decoders import DECODERS, assert_close, decoder, token_ids
from support.devices import on_device


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 0.1).sqrt() * weight + bias


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight


NORMS = {
    "layer": (LayerNorm(eps=0.1), layer),
    "layer without bias": (LayerNorm(eps=0.1, bias=False), lambda x, w: layer(x, w, torch.zeros_like(w))),
    "rms": (RMSNorm(eps=0.1), rms),
    "layer without weight": (LayerNorm(eps=0.1, weight=False), lambda x, b: layer(x, torch.ones_like(b), b)),
    "layer without both": (
        LayerNorm(eps=0.1, weight=False, bias=False),
        lambda x: layer(x, torch.ones_like(x), torch.zeros_like(x)),
    ),
    "layer plus 1": (LayerNorm(eps=0.1, offset=1.0), lambda x, w, b: layer(x, 1 + w, b)),
    "rms plus 1": (RMSNorm(eps=0.1, offset=1.0), lambda x, w: rms(x, 1 + w)),
    "rms without weight": (RMSNorm(eps=0.1, weight=False), lambda x: rms(x, torch.ones_like(x))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norm_is_the_exact_formula_rounded_once(name: str, dtype: torch.dtype) -> None:
    part, formula = NORMS[name]
    torch.manual_seed(0)
    norm = on_device(build_norm(part, DECODERS["llama"], width=64).to(dtype))
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = (torch.randn(50, 64) * 3 + 1).to(dtype)
    exact = formula(x.double(), *(p.double() for p in norm.parameters()))
    got = norm(x)
    assert got.dtype == dtype
    ulp = torch.finfo(dtype).eps  # rounding alone is half of it; near a tie, fp32 may round to the other neighbor
    fp32 = 0 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(got.double(), exact, rtol=0.51 * ulp if ulp > 1e-6 else 4 * ulp, atol=fp32 or 1e-14)


def test_softmax_over_bf16_scores_is_rounded_once() -> None:
    torch.manual_seed(0)
    q = torch.eye(8).bfloat16()[None, :, None]  # the scores are then the keys
    k = (torch.randn(1, 8, 1, 8) * 3).bfloat16()
    got = attention_weights(q, k, scale=1.0)[0, 0]
    scores = k[0, :, 0].float().T.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    assert torch.equal(got, scores.softmax(-1).bfloat16())


def test_far_positions_rotate_bf16_vectors_by_exact_angles() -> None:
    x, positions = torch.randn(1, 3, 2, 8).bfloat16(), torch.tensor([[1000, 5001, 100_003]])
    got = rotate(x, *rotary(Rotary(), 8, positions, positions))
    angles = positions[..., None].double() * 10_000 ** (-torch.arange(0, 8, 2).double() / 8)
    a, b = x.double().chunk(2, -1)
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    exact = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    assert got.dtype == torch.bfloat16
    # fp32 angles at position 100,003 have errors of 0.004
    torch.testing.assert_close(got.double(), exact, rtol=0.004, atol=0.02)


@torch.inference_mode()
@pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS.keys())
def test_logits_of_each_dtype_are_near_those_of_fp64(config: DecoderConfig) -> None:
    tokens = token_ids(config)
    exact = decoder(config, torch.float64)(tokens)
    assert exact.dtype == torch.float64
    assert (exact != exact.float()).any()
    same = decoder(config).double()(tokens)  # the fp32 weights, used in fp64
    assert_close(decoder(config)(tokens).double(), same, 1e-5)
    rounded = decoder(config).bfloat16().double()(tokens)
    low = decoder(config).bfloat16()(tokens)
    assert low.dtype == torch.bfloat16
    if not any(hasattr(block.mlp, "router") for block in decoder(config).blocks if hasattr(block, "mlp")):
        assert_close(low.double(), rounded, 0.08)  # rounding may change a router's choice


def test_embedding_scale_is_rounded_to_the_dtype_first() -> None:
    x = torch.full((2,), 3.0, dtype=torch.bfloat16)
    assert torch.equal(Scale(0.1)(x), x * torch.tensor(0.1, dtype=torch.bfloat16))
