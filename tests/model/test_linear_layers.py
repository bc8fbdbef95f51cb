"""In training, layers with the same input are computed as one matrix product, with the same results as separate
layers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from onward.kernels import operations
from onward.model import Linear
from onward.model.layers import is_plain, outputs_of

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


@pytest.fixture(autouse=True)
def every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MIN_PARALLEL", 1)


def layers(dtype: torch.dtype = torch.float32, bias: bool = False) -> list[Linear]:
    torch.manual_seed(0)
    return [Linear(8, outputs, bias=bias).to(dtype) for outputs in (6, 2, 2)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_outputs_and_gradients_equal_those_of_the_layers(dtype: torch.dtype, bias: bool) -> None:
    three = layers(dtype, bias)
    x = torch.randn(3, 5, 8).to(dtype).requires_grad_()
    leaves = [x, *(p for layer in three for p in layer.parameters())]
    found = []
    for outputs in outputs_of(three, x), [layer(x) for layer in three]:
        total = sum((y.double().square().sum() for y in outputs), torch.zeros(()))
        found.append([*outputs, *torch.autograd.grad(total, leaves)])
    assert "Split" in type(outputs_of(three, x)[0].grad_fn).__name__
    for got, wanted in zip(*found):
        torch.testing.assert_close(got, wanted, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


class Doubled(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


CHANGES: dict[str, Callable[[list[Linear]], object]] = {
    "a hook": lambda three: three[1].register_forward_hook(lambda module, inputs, y: 2 * y),
    "a pre-hook": lambda three: three[1].register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],)),
    "a replaced forward": lambda three: setattr(three[1], "forward", lambda x: 2 * x[..., :2]),
    "another class": lambda three: three.__setitem__(1, Doubled(8, 2)),
    "one bias": lambda three: setattr(three[1], "bias", nn.Parameter(torch.ones(2))),
    "another dtype": lambda three: three[1].half(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layer_is_called_by_itself(change: str) -> None:
    three, x = layers(), torch.randn(3, 8)
    CHANGES[change](three)
    if change == "another dtype":
        with pytest.raises(RuntimeError, match="dtype"):
            outputs_of(three, x)
        return
    assert is_plain(three[1]) == (change == "one bias")
    for got, layer in zip(outputs_of(three, x), three):
        assert torch.equal(got, layer(x))


def test_gradient_hooks_of_a_layer_are_called() -> None:
    three, seen = layers(), []
    three[2].register_full_backward_hook(lambda module, of_inputs, of_outputs: seen.append(of_outputs[0].shape))
    sum(y.sum() for y in outputs_of(three, torch.randn(3, 8, requires_grad=True))).backward()
    assert seen == [(3, 2)]
