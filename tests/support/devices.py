"""The device of the models and tensors of tests: `pytest --device cuda` runs any test on a GPU."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

TESTS = str(Path(__file__).parents[1])
FACTORIES = {
    torch.tensor,
    torch.arange,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.eye,
    torch.empty,
    torch.logspace,
} | {
    torch.randn,
    torch.rand,
    torch.randint,
}
T = TypeVar("T", Tensor, nn.Module, Any)
_device = torch.device("cpu")


def device() -> torch.device:
    """The device of this test run."""
    return _device


def on_device(value: T) -> T:
    """Move a tensor or a module to the device of this test run."""
    return value.to(_device)


class TensorsOfTests(TorchFunctionMode):
    """Moves tensors that test files make to the device, but not those that the package makes, so that a missing
    `device=` in the package is found."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if func not in FACTORIES or "device" in (kwargs or {}) or not caller(2).startswith(TESTS):
            return value
        return on_device(value.detach()).requires_grad_(value.requires_grad)


def caller(depth: int) -> str:
    return sys._getframe(depth).f_code.co_filename


@contextmanager
def using(name: str) -> Iterator[None]:
    """Choose the device, before any test is imported."""
    global _device
    before, _device = _device, torch.device(name)
    with nullcontext() if name == "cpu" else TensorsOfTests():
        yield
    _device = before
