"""Norms, rotations and gates as one kernel equal the operations of PyTorch that they replace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from onward import Decoder
from onward.kernels import operations
from onward.kernels.operations import gate, rotate
from onward.model import GatedFeedForwardModule, RMSNormModule

from support.decoders import DECODERS

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # maximum relative difference


@contextmanager
def kernels(used: bool) -> Iterator[None]:
    """Inside the context, use kernels for tensors of any size if `used`, else for none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "COMPILED_AFTER", 0)
        patch.setattr(operations, "MIN_PARALLEL", 1 if used else 1 << 60)
        yield


def assert_near(got: Tensor, wanted: Tensor, bound: float) -> None:
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)


def assert_kernels_change_nothing(function: Callable[[Tensor], Tensor], x: Tensor, bound: float, *weights: Tensor):
    """Check that the result, with and without gradients, and the gradients of x and of weights are the same with
    kernels."""
    found: list[list[Tensor]] = []
    for used in False, True:
        leaves = [x.detach().clone().requires_grad_(), *weights]
        with kernels(used):
            y = function(leaves[0])
            outer = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
            gradients = torch.autograd.grad(y, leaves, outer)
            with torch.no_grad():
                found.append([y.detach(), function(leaves[0]), *gradients])
    for wanted, got in zip(*found):
        assert_near(got, wanted, bound * max(1, wanted.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_equal_the_operations_that_they_replace(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for width in 1, 15, 16, 70:
        x, norm = torch.randn(2, 5, width).to(dtype), RMSNormModule(width, 1e-6, 1.0)
        nn.init.normal_(norm.weight)
        for layer in norm, norm.to(dtype):
            assert_kernels_change_nothing(layer, x, 2 * DTYPES[dtype], layer.weight)
            with kernels(used=True):
                assert "RMSNorm" in type(layer(x).grad_fn).__name__
    for (d_head, half), rows in product(((6, 3), (70, 17), (64, 32)), (1, 2)):
        x, angles = torch.randn(2, 5, 3, d_head).to(dtype), torch.randn(rows, 5, 1, half)
        turn = partial(rotate, cos=angles.cos(), sin=angles.sin())
        assert_kernels_change_nothing(turn, x, 2 * DTYPES[dtype])
        with kernels(used=True):
            assert "Rotation" in type(turn(x.requires_grad_()).grad_fn).__name__
    for activation in "relu", "relu2", "gelu", "gelu_tanh", "silu":
        mlp = GatedFeedForwardModule(24, 37, activation, False, 0.0).to(dtype)  # type: ignore[arg-type]
        assert_kernels_change_nothing(mlp, torch.randn(2, 5, 24).to(dtype), 4 * DTYPES[dtype])
        x, y = torch.linspace(-30, 30, 301).to(dtype), torch.randn(301).to(dtype).requires_grad_()
        gated = partial(gate, y=y, activation=activation)  # type: ignore[arg-type]
        assert_kernels_change_nothing(gated, x, 4 * DTYPES[dtype], y)
        with kernels(used=True):
            assert "Gate" in type(gated(x).grad_fn).__name__


def test_norm_under_autocast_has_its_dtype_and_equals_the_operation() -> None:
    torch.manual_seed(0)
    norm = RMSNormModule(70, 1e-6, 0.0)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return norm(x)  # type: ignore[no-any-return]

    assert_kernels_change_nothing(cast, torch.randn(3, 5, 70), 2**-7, norm.weight)


@pytest.mark.parametrize("name", DECODERS)
def test_logits_of_every_decoder_are_those_without_the_kernels(name: str) -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(DECODERS[name]).eval(), torch.randint(DECODERS[name].vocab_size, (2, 7))
    found = []
    for used, gradients in product((False, True), repeat=2):
        with kernels(used), torch.set_grad_enabled(gradients):
            found.append(model(tokens).detach())
    for logits in found:
        assert_near(logits, found[0], 1e-5)


def test_short_work_never_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "counted", type(operations.counted)())
    monkeypatch.setattr(operations, "COMPILED_AFTER", 3 * operations.MIN_PARALLEL)
    x = torch.randn(64, operations.MIN_PARALLEL // 64)
    with torch.no_grad():
        assert not operations.is_worth("rms_norm", x[:-1])
        found = [operations.is_worth("rms_norm", x) for _ in range(5)]
    assert found == [False, False, False, True, True]
