"""Tensors and modes that kernels do not support are left to PyTorch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onward.kernels.operations import kernels_can_read, linear, takes_kernels
from onward.model import layers as products

torch.manual_seed(0)
W, X, B = torch.randn(8, 16), torch.randn(3, 16), torch.randn(8)
Product = Callable[..., Tensor]


class Subclass(Tensor):
    pass


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is F.linear else result


def traced(f: Product) -> Tensor:
    return torch.jit.trace(lambda x: f(x, W, B), X)(2 * X)


def forward_mode(f: Product) -> Tensor:
    with forward_ad.dual_level():
        return torch.stack(forward_ad.unpack_dual(f(forward_ad.make_dual(X, X.cos()), W, B)))


def default_device(f: Product) -> Tensor:
    with torch.device("meta"):
        return f(X, W, B)


def doubled(f: Product) -> Tensor:
    with Doubled():
        return f(X, W, B)


def cast(f: Product) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return f(X, W, B)


def fake(f: Product) -> Tensor:
    with FakeTensorMode() as mode:
        y = f(mode.from_tensor(X), mode.from_tensor(W), mode.from_tensor(B))
    return torch.zeros(y.shape)


def called(f: Product) -> Tensor:
    layer = products.Linear(16, 8) if f is linear else torch.nn.Linear(16, 8)
    return torch.func.functional_call(layer, {"weight": W, "bias": B}, X)


ignored = pytest.mark.filterwarnings("ignore:.*(deprecated|prototype)")
STATES: dict[str, Callable[[Product], Tensor]] = {
    "plain": lambda f: f(X, W, B),
    "torch.jit.trace": traced,
    "forward AD": forward_mode,
    "jvp": lambda f: torch.stack(torch.func.jvp(lambda x: f(x, W, B), (X,), (X.sin(),))),
    "vmap of x": lambda f: torch.vmap(lambda x: f(x, W, B))(X),
    "vmap of the weight": lambda f: torch.vmap(lambda w: f(X, w))(torch.stack([W, -W])),
    "torch.func.grad": lambda f: torch.func.grad(lambda x: f(x, W, B).sum())(X),
    "functionalize": lambda f: torch.func.functionalize(lambda x: f(x, W, B))(X),
    "functional_call": called,
    "make_fx": lambda f: make_fx(lambda x: f(x, W, B))(X)(2 * X),
    "function mode": doubled,
    "default device": default_device,
    "autocast": cast,
    "fake tensors": fake,
    "meta": lambda f: torch.zeros(f(X.to("meta"), W.to("meta"), B.to("meta")).shape),
    "subclass": lambda f: f(X.as_subclass(Subclass), W, B),
    "lazy negation": lambda f: f(torch._neg_view(X), W, B),
    "lazy zeros": lambda f: f(torch._efficientzerotensor((3, 16)), W, B),
    "inference": torch.inference_mode()(lambda f: f(X.clone(), W, B)),
}


@ignored
@pytest.mark.parametrize("state", STATES)
@torch.no_grad()
def test_products_are_those_of_pytorch_in_every_state(state: str) -> None:
    torch.testing.assert_close(STATES[state](linear), STATES[state](F.linear), rtol=1e-4, atol=1e-4)


@ignored
@torch.no_grad()
def test_kernels_read_plain_tensors_alone() -> None:
    with torch.inference_mode():
        inference = X.clone()
    for x in X, inference, X[1:], X.mT:
        assert takes_kernels(x)
    nested = torch.nested.nested_tensor([X, X[:2]])
    for x in X.to_sparse(), nested, torch._neg_view(X), X.as_subclass(Subclass), X.to("meta"):
        assert not kernels_can_read(x)
