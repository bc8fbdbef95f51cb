"""All backends of a mixture of experts compute the same result."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from onward import Experts, SigmoidRouting, SoftmaxRouting
from onward.model import ExpertsModule, build_mlp
from onward.model.experts import FASTEST
from onward.transforms import compile_blocks

from support.allocations import Allocations
from support.decoders import assert_close, config, decoder, token_ids
from support.devices import on_device
from support.grids import first

SIZES = [(16, 15), (15, 7), (7, 1), (1, 3)]  # d_model and width of an expert; few are multiples of 16 bytes


def experts(d_model: int, d_ff: int, *, dtype: torch.dtype = torch.float32, **options: object) -> ExpertsModule:
    torch.manual_seed(0)
    c = config(d_model=d_model, n_heads=1, d_head=2)
    part = Experts(count=6, top_k=2, d_ff=d_ff, **options)  # type: ignore[arg-type]
    module = on_device(build_mlp(part, c).to(dtype))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def over_all_experts(module: ExpertsModule, x: Tensor) -> Tensor:
    """Apply every expert to every token; the weights of experts that are not chosen are zero."""
    gates = (x @ module.router.weight.mT).softmax(-1)
    kth = gates.sort(-1, descending=True).values[:, module.part.top_k - 1, None]
    gates = gates * (gates >= kth)
    if module.part.router.renormalize:
        gates = gates / gates.sum(-1, keepdim=True)

    def project(name: str, x: Tensor) -> Tensor:  # (X, N, I) -> (X, N, O)
        bias = getattr(module, f"{name}_bias")
        y = x @ getattr(module, name).mT
        return y if bias is None else y + bias[:, None]

    up = project("up", x[None])
    inner = module.act(project("gate", x[None])) * up if module.part.gated else module.act(up)
    y = torch.einsum("xnd,nx->nd", project("down", inner), gates)
    return y if module.shared is None else y + module.shared(x)


def answers(module: ExpertsModule, x: Tensor, backend: str) -> list[Tensor]:
    """The output, and the gradients of x and of all parameters."""
    if backend != "all":
        module.part = replace(module.part, backend=backend)  # type: ignore[arg-type]
    x = x.clone().requires_grad_()
    y = over_all_experts(module, x) if backend == "all" else module(x)
    return [y, *torch.autograd.grad((y * torch.arange(y.size(1)).cos()).sum(), [x, *module.parameters()])]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"router": SoftmaxRouting(renormalize=False)},
        {"d_shared": 9, "act": "gelu"},
        {"bias": True},
        {"gated": False, "act": "relu2", "d_shared": 9, "bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("backend", ["loop", "grouped", "auto"])
def test_backends_equal_the_formula_over_all_experts(
    backend: str, size: tuple[int, int], options: dict[str, Any]
) -> None:
    module = experts(*size, **options)
    for tokens in (1, 9):  # with one token, most experts get no token
        x = torch.randn(tokens, size[0])
        for got, wanted in zip(answers(module, x, backend), answers(module, x, "all")):
            assert_close(got, wanted)


@pytest.mark.parametrize("tokens", [1, 9, 33])
@pytest.mark.parametrize("options", [{}, {"d_shared": 9, "act": "gelu"}, {"bias": True}], ids=str)
def test_kernel_equals_the_formula_over_all_experts(tokens: int, options: dict[str, Any]) -> None:
    module, x = experts(16, 15, **options), on_device(torch.randn(tokens, 16))
    with torch.inference_mode():
        assert_close(module(x), over_all_experts(module, x))


@pytest.mark.parametrize("backend", ["loop", "auto"])
def test_fp64_stays_fp64(backend: str) -> None:
    module = experts(7, 5, dtype=torch.float64, d_shared=5)
    x = torch.randn(9, 7, dtype=torch.float64)
    for got, wanted in zip(answers(module, x, backend), answers(module, x, "all")):
        assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_backends_differ_by_rounding_only_in_bf16(size: tuple[int, int]) -> None:
    module = experts(*size, dtype=torch.bfloat16)
    x = torch.randn(9, size[0]).bfloat16()
    for got, wanted in zip(answers(module, x, "grouped"), answers(module, x, "loop")):
        assert_close(got, wanted, 0.03)


def test_the_router_is_computed_in_fp32() -> None:
    module = experts(8, 4, dtype=torch.bfloat16, router=SoftmaxRouting(renormalize=False))
    x = torch.randn(50, 8).bfloat16()
    weight, chosen = module.router(x)
    assert torch.equal(weight, (x.float() @ module.router.weight.float().mT).softmax(-1).gather(1, chosen))


def test_sigmoids_that_are_all_zero_give_no_nan() -> None:
    router = experts(4, 3, router=SigmoidRouting()).router
    router.weight.data.abs_()
    weight, _ = router(torch.full((2, 4), -1e4))
    assert torch.equal(weight, torch.zeros(2, 2))


@contextmanager
def timing() -> Iterator[None]:
    """Check that backends are timed for exactly one new shape inside the block."""
    before = len(FASTEST)
    yield
    assert len(FASTEST) == before + 1


@pytest.mark.parametrize(("mode", "d_ff"), [(torch.inference_mode, 40), (torch.no_grad, 41)])
def test_backend_is_timed_where_gradients_are_disabled(
    mode: Callable[[], Any], d_ff: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.model.experts.takes_kernel", lambda *_: False)
    with timing(), mode():
        assert experts(8, d_ff, backend="auto")(torch.randn(2, 3, 8)).shape == (2, 3, 8)


def test_backend_is_timed_once_for_a_shape() -> None:
    module, x = experts(8, 42, backend="auto"), torch.randn(3, 8)

    def flops() -> int:
        with FlopCounterMode(display=False) as counter:
            module(x)
        return counter.get_total_flops()

    with timing():
        timed, *later = flops(), flops(), flops()
    assert timed > later[0] == later[1]


@pytest.mark.parametrize("backend", ["loop", "grouped", "auto"])
def test_backends_copy_no_weights(backend: str) -> None:
    module = experts(64, 32, backend=backend)
    with timing() if backend == "auto" else nullcontext(), torch.inference_mode(), Allocations() as made:
        module(torch.randn(2, 64))
    assert 0 < made.largest < module.gate.nbytes / 4


@pytest.mark.long
@pytest.mark.parametrize("backend", first(1, ["grouped", "loop"]))
def test_compiled_experts_equal_eager_ones_under_autocast(backend: str) -> None:
    part = Experts(count=6, bias=True, d_shared=6, backend=backend)  # type: ignore[arg-type]
    model, results = decoder(config(mlp=part)), []
    for ready in lambda: None, lambda: compile_blocks(model, backend="aot_eager"):
        ready()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(token_ids(model.config))
        results.append([y, *torch.autograd.grad(y.float().square().mean(), list(model.parameters()))])
    for got, wanted in zip(*results):
        assert_close(got, wanted, 0.02)
