"""Kernels read the arguments that their callers set, by name or by position."""

from typing import Any

import pytest
import torch

from onward.kernels.llvm.compiler import arguments, callable_kernel
from onward.kernels.memory import address

Added = arguments("Added", "x", "y")


def test_misspelled_argument_is_an_error() -> None:
    given = Added(x=1)
    with pytest.raises(AttributeError, match="z"):
        given.z = 3
    with pytest.raises(AttributeError, match="z"):
        Added(z=3)


def test_kernel_takes_arguments_by_position_and_by_name() -> None:
    def emit(code: Any, given: Any, first: Any, end: Any) -> None:
        with code.loop(first, end) as (index, _):
            x, y = (code.scalar(each, "float32", index) for each in (given.x, given.y))
            code.put(code.fadd(x, y), given.y, "float32", index)

    kernel = callable_kernel(Added, emit)
    x, y = torch.ones(4), torch.zeros(4)
    addresses = [address(each, torch.float32, 4) for each in (x, y)]
    kernel(*addresses, 4, 1)
    kernel(*addresses, threads=1, items=3)
    kernel(y=addresses[1], x=addresses[0], items=2, threads=1)
    assert y.tolist() == [3, 3, 2, 1]
