"""Quantized layers: values are rounded to the nearest code, every implementation multiplies by the same numbers, and a
model stays usable."""

import pytest
import torch

from onward import Decoder, KVCache, LatentAttention, UserError
from onward.compiled.steps import compile_step
from onward.kernels.quantized import dequantize_weight
from onward.model import Linear
from onward.transforms import quantize_model
from onward.transforms.quantize import Precision, QuantizedLinear, quantize_weight

from support.decoders import DECODERS, config, decoder

PRECISIONS: list[Precision] = ["int8", "int4"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_weight_is_rounded_to_the_nearest_code(precision: Precision):
    torch.manual_seed(0)
    weight = torch.randn(20, 96)
    weight[3] = 0
    weight[4, :32] = 0
    codes, scales = quantize_weight(weight, precision)
    exact = dequantize_weight(codes, scales, torch.float32)
    width, least, greatest = (96, -127, 127) if precision == "int8" else (32, -8, 7)
    step = scales.float().view(20, -1).repeat_interleave(width, 1)
    choices = step[..., None] * torch.arange(least, greatest + 1)
    nearest = (choices - weight[..., None]).abs().amin(-1)
    assert torch.allclose((exact - weight).abs(), nearest, atol=1e-6)
    assert ((exact - weight).abs() <= step.abs() * (0.51 if precision == "int8" else 1.05)).all()


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_path_multiplies_by_the_dequantized_weight(precision: Precision, dtype: torch.dtype, rows: int):
    torch.manual_seed(0)
    layer = QuantizedLinear.of(Linear(64, 700).to(dtype), precision)
    x = torch.randn(2, rows, 64, dtype=dtype)
    exact = x.double() @ dequantize_weight(layer.codes, layer.scales, torch.float64).T + layer.bias.double()
    bound = 1e-5 if dtype == torch.float32 else 0.04
    with torch.no_grad():
        assert (layer(x).double() - exact).abs().max() < bound
    assert (layer(x.requires_grad_()).double() - exact).abs().max() < bound
    layer(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_quantized_model_is_compiled_and_equals_its_plain_steps(precision: Precision):
    torch.manual_seed(0)
    model = Decoder(DECODERS["llama"]).eval()
    kept = quantize_model(model, precision)
    assert kept if precision == "int4" else not kept  # layers narrower than a group are not quantized
    caches = [KVCache(model.config, 2, 12) for _ in range(2)]
    program = compile_step(model, caches[0], (2, 1))
    with torch.inference_mode():
        for step in range(6):
            tokens, positions = torch.randint(0, model.config.vocab_size, (2, 1)), torch.full((2, 1), step)
            plain = model(tokens, positions, caches[1])
            assert torch.allclose(program.run(tokens, positions, caches[0], 12), plain, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_projections_of_latents_are_not_quantized_and_steps_are_compiled(precision: Precision):
    part = LatentAttention(d_latent=32, d_nope=6, d_rope=4, d_value=8)
    model = decoder(config(n_layers=1, d_model=32, attention=part))
    assert not quantize_model(model, precision)
    assert [name for name, layer in model.named_modules() if isinstance(layer, Linear)] == ["blocks.0.attn.kv"]
    caches = [KVCache(model.config, 1, 8) for _ in range(2)]
    program, token = compile_step(model, caches[0], (1, 1)), torch.tensor([[5]])
    with torch.inference_mode():
        for position in torch.arange(4)[:, None, None]:
            plain = model(token, position, caches[1])
            assert torch.allclose(program.run(token, position, caches[0], 8), plain, atol=1e-5)


def test_an_unknown_precision_is_refused():
    with pytest.raises(UserError, match="choose int8 or int4"):
        quantize_model(Decoder(DECODERS["llama"]), "int3")
