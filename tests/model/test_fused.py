"""Norms, rotations and gates as one kernel equal the operations of PyTorch that they replace."""

import pytest
import torch
from torch import Tensor, nn

from onward.model import fused
from onward.model.decoder import Decoder
from onward.model.feedforward import GatedFeedForwardModule
from onward.model.norms import RMSNormModule
from onward.model.positions import rotate

from support.decoders import DECODERS

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # the bound of relative differences: a unit in the last place


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are used from the first number on."""
    monkeypatch.setattr(fused, "COMPILED_AFTER", 0)
    monkeypatch.setattr(fused, "MIN_PARALLEL", 1)


def assert_near(got: Tensor, wanted: Tensor, bound: float) -> None:
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_equal_the_operations_that_they_replace(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for width in 1, 15, 16, 70:
        x, norm = torch.randn(2, 5, width).to(dtype), RMSNormModule(width, 1e-6, 1.0)
        nn.init.normal_(norm.weight)
        for layer in norm, norm.to(dtype):
            wanted = layer(x)  # gradients are recorded, so PyTorch computes it
            with torch.no_grad():
                assert fused.rms_norm(x, layer.weight, 1e-6, 1.0) is not None
                assert_near(layer(x), wanted.detach(), DTYPES[dtype])
    for d_head, half in (6, 3), (70, 17), (64, 32):
        x, angles = torch.randn(2, 5, 3, d_head).to(dtype), torch.randn(2, 5, 1, half)
        wanted = rotate(x.requires_grad_(), angles.cos(), angles.sin())
        with torch.no_grad():
            assert fused.rotate(x.detach(), angles.cos(), angles.sin()) is not None
            assert torch.equal(rotate(x.detach(), angles.cos(), angles.sin()), wanted)
    for activation in "relu", "gelu", "gelu_tanh", "silu":
        mlp = GatedFeedForwardModule(24, 37, activation, False, 0.0).to(dtype)  # type: ignore[arg-type]
        x = torch.randn(2, 5, 24).to(dtype)
        wanted = mlp(x)
        with torch.no_grad():
            assert_near(mlp(x), wanted.detach(), 4 * DTYPES[dtype])


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", DECODERS)
def test_logits_of_every_decoder_are_those_without_the_kernels(name: str) -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(DECODERS[name]).eval(), torch.randint(DECODERS[name].vocab_size, (2, 7))
    wanted = model(tokens)
    with torch.no_grad():
        assert_near(model(tokens), wanted.detach(), 1e-5)


def test_short_work_never_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "counted", type(fused.counted)())
    monkeypatch.setattr(fused, "COMPILED_AFTER", 3 * fused.MIN_PARALLEL)
    x, weight = torch.randn(64, fused.MIN_PARALLEL // 64), torch.ones(fused.MIN_PARALLEL // 64)
    found = [fused.rms_norm(x, weight, 1e-6, 0.0) is not None for _ in range(5)]
    assert found == [False] * 5, "weights that need gradients"
    with torch.no_grad():
        assert fused.rms_norm(x[:-1], weight, 1e-6, 0.0) is None
        found = [fused.rms_norm(x, weight, 1e-6, 0.0) is not None for _ in range(5)]
    assert found == [False, False, False, True, True]
