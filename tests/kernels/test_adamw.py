"""The kernel of AdamW makes the steps of torch's AdamW, and leaves to it the steps that it cannot make."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onward.kernels import adamw, rules
from onward.training.step.optimizer import AdamW

from support.guard import SIDES, guarded

SHAPES = (1,), (15,), (1023,), (1025,), (3, 5, 7), (40, 60)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step was made by the kernel; small ones are as well."""
    results: list[bool] = []

    def update(*arguments: Any) -> bool:
        results.append(adamw.update(*arguments))
        return results[-1]

    monkeypatch.setattr(rules, "MIN_PARALLEL", 1)
    monkeypatch.setattr("onward.training.step.optimizer.update", update)
    return results


def of_parameters(cls: type[torch.optim.AdamW], tensors: list[Tensor], **options: Any) -> torch.optim.AdamW:
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    groups = [{"params": parameters[::2], "weight_decay": 0.3}, {"params": parameters[1::2], "lr": 0.03}]
    return cls(groups, lr=0.01, betas=(0.8, 0.95), **options)


def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def steps(
    optimizer: torch.optim.Optimizer, count: int, first: int = 0, place: Callable[[Tensor], Tensor] = Tensor.clone
):
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for p in parameters(optimizer):
            p.grad = place(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
        optimizer.step()


@pytest.mark.parametrize("side", SIDES)
def test_steps_equal_those_of_torch_in_fp64_between_guard_pages(side: str, made: list[bool]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    ours, exact = (
        of_parameters(AdamW, [guarded(t.float(), side) for t in tensors]),
        of_parameters(torch.optim.AdamW, [t.clone() for t in tensors]),
    )
    steps(ours, 1)
    for state in ours.state.values():
        state.update({name: guarded(state[name], side) for name in adamw.MOMENTS})
    steps(ours, 5, 1, lambda t: guarded(t, side))
    steps(exact, 6)
    assert made == [False, *[True] * 5]
    for got, wanted in zip(parameters(ours), parameters(exact)):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=2e-6)
        for name, value in exact.state[wanted].items():
            torch.testing.assert_close(ours.state[got][name].double(), value.double(), rtol=1e-5, atol=1e-6)


def test_steps_after_loading_the_state_have_the_same_bits(made: list[bool]) -> None:
    torch.manual_seed(0)
    whole = of_parameters(AdamW, [torch.randn(shape) for shape in SHAPES])
    steps(whole, 3)
    resumed = of_parameters(AdamW, [torch.zeros(shape) for shape in SHAPES])
    for p, known in zip(parameters(resumed), parameters(whole)):
        p.data.copy_(known)
    resumed.load_state_dict(deepcopy(whole.state_dict()))
    for optimizer in whole, resumed:
        steps(optimizer, 2, 3)
    assert made[-4:] == [True] * 4
    assert all(map(torch.equal, parameters(whole), parameters(resumed)))


OTHERS: dict[str, Callable[[list[Tensor]], torch.optim.AdamW]] = {
    "fp64": lambda tensors: of_parameters(AdamW, [t.double() for t in tensors]),
    "bf16": lambda tensors: of_parameters(AdamW, [t.bfloat16() for t in tensors]),
    "strided": lambda tensors: of_parameters(AdamW, [t.repeat_interleave(2, -1)[..., ::2] for t in tensors]),
    "amsgrad": lambda tensors: of_parameters(AdamW, tensors, amsgrad=True),
    "maximize": lambda tensors: of_parameters(AdamW, tensors, maximize=True),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_steps_are_left_to_torch(kind: str, made: list[bool]) -> None:
    torch.manual_seed(0)
    optimizer = OTHERS[kind]([torch.randn(shape) for shape in SHAPES])
    torchs = deepcopy(optimizer)
    torchs.__class__ = torch.optim.AdamW
    for each in optimizer, torchs:
        steps(each, 3)
    assert made == [False] * 3
    assert all(map(torch.equal, parameters(optimizer), parameters(torchs)))


def test_each_step_calls_hooks_once_and_counts_as_a_change_of_the_weights() -> None:
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # torch wraps the `step` of each class that it makes
    optimizer, calls = of_parameters(AdamW, [torch.randn(shape) for shape in SHAPES]), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(3):
        versions = [p._version for p in parameters(optimizer)]
        steps(optimizer, 1, step)
        assert all(p._version > version for p, version in zip(parameters(optimizer), versions))
    assert calls == ["before", "after"] * 3
