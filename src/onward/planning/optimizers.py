"""Optimizers of libraries or of your own, given as "module:Class", and the bytes of their state, measured by running a
step."""

import math
from functools import cache
from typing import Any

import torch
from torch import nn

from onward.base.errors import UserError
from onward.base.own import named

PRIMES = 31, 37, 41, 43, 47  # sizes of the smaller parameter in `state_of`


def library_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer class named by "module:Class". Raises a UserError if it cannot be imported, or is not an
    optimizer."""
    cls, arguments = named(
        "optimizer", name, "choose adamw, muon, normuon, or a library's class, such as torch.optim:NAdam"
    )
    if arguments or not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UserError(f"{name} is not an optimizer: name a class that is a torch.optim.Optimizer")
    return cls


@cache
def state_of(name: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of the state that an optimizer keeps for a parameter of this shape in fp32: the optimizer makes
    a step on a smaller parameter with distinct sizes, which identify the dimensions in the shapes of the state. Raises
    a UserError if the step fails."""
    small = tuple(min(size, prime) for size, prime in zip(shape, PRIMES))
    sizes = {prime: size for size, prime in zip(shape, PRIMES) if size > prime}
    parameter = nn.Parameter(torch.zeros(small))
    parameter.grad = torch.ones(small)
    try:
        optimizer: Any = library_class(name)([parameter], lr=1e-3)  # type: ignore[call-arg]
        optimizer.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"Cannot count the state of the optimizer {name}, because a step of it fails: {error}"
        ) from None
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    full = lambda t: shape if t.numel() == parameter.numel() else [sizes.get(size, size) for size in t.shape]
    return sum(t.element_size() * math.prod(full(t)) for t in tensors if t.ndim)
