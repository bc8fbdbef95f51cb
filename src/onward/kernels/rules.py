"""When a kernel computes in the place of PyTorch, and how it is called: what all files of this folder share.

Each of them has the formula in plain PyTorch first, then the rule when its kernel is taken, then the call. The machine
code of the kernels is emitted by `llvm/`, which `emitter` imports when the first kernel is needed.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onward.kernels.available import unavailable
from onward.kernels.memory import address, buffer

MIN_PARALLEL = 1 << 16  # elements of a weight or an activation from which several threads are faster than one
COMPILED_AFTER = 1 << 24  # elements that PyTorch computes before a kernel is compiled, which takes some 50 ms
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # of kernels
counted = Counter[str]()  # elements that PyTorch has computed, by the name of the kernel


@cache
def emitter(name: str) -> Any:
    """Return a module of `llvm/`, which imports the compiler."""
    return importlib.import_module(f"onward.kernels.llvm.{name}")


def takes_kernels(x: Tensor) -> bool:
    """Return whether a kernel may read x, and neither gradients nor autocast are enabled."""
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and kernels_can_read(x)


def kernels_can_read(x: Tensor) -> bool:
    """Return whether x is a plain tensor in the memory of a CPU, and no operation of PyTorch is watched."""
    return not is_watched() and type(x) is Tensor and torch._C._dispatch_keys(x).raw_repr() in plain_keys()


def is_watched() -> bool:
    """Return whether something sees, records, transforms or differentiates the operations of PyTorch now. Kernels and
    compiled steps are none of these operations."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()  # such as a counter of FLOPs, or fake tensors
        or torch._C._len_torch_function_stack()  # such as torch.set_default_device
        or torch._C._is_tracing()  # torch.jit.trace
        or torch._C._functorch.peek_interpreter_stack() is not None  # vmap, grad, jvp, functionalize
        or forward_ad._current_level >= 0
    )


@cache
def plain_keys() -> frozenset[int]:
    """Return the dispatch keys of plain dense tensors in the memory of a CPU: without those of subclasses, sparse and
    nested layouts, wrappers of transforms, and the flags of lazy negation and zeros."""
    with torch.inference_mode(False):
        keys = [torch._C._dispatch_keys(torch.empty(0, device="cpu", dtype=torch.float32)).raw_repr()]
    with torch.inference_mode():
        keys.append(torch._C._dispatch_keys(torch.empty(0, device="cpu", dtype=torch.float32)).raw_repr())
    return frozenset(keys)


def is_worth(name: str, x: Tensor) -> bool:
    """Return whether the kernel `name` computes an activation from x: x is large, and either gradients are needed, or
    PyTorch has computed so much of it that compiling pays. With gradients kernels are taken from the first step on,
    so that a resumed run repeats every bit."""
    if x.numel() < MIN_PARALLEL or x.dtype not in DTYPES:
        return False
    if torch.is_grad_enabled():
        if not kernels_can_read(x):
            return False
    elif not takes_kernels(x):
        return False
    elif counted[name] < COMPILED_AFTER:
        counted[name] += x.numel()
        return False
    return not unavailable()


def run(kernel: Callable[..., None], x: Tensor, *others: Tensor, items: int) -> Tensor:
    """Call a kernel that writes a tensor like x."""
    y, target = buffer(x.shape, x.dtype)
    launch(kernel, target, x, *others, items=items)
    return y


def launch(kernel: Callable[..., None], *arguments: Tensor | int, items: int) -> None:
    """Call a kernel with the addresses of contiguous tensors, and numbers."""
    values = (address(each, each.dtype, *each.shape) if isinstance(each, Tensor) else each for each in arguments)
    kernel(*values, items, torch.get_num_threads())
