"""The rules by which a kernel replaces PyTorch's operations, and the calls of kernels, shared by the files of this
folder."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from onward.kernels.available import unavailable
from onward.kernels.memory import address, buffer

MIN_PARALLEL = 1 << 16  # elements of a weight or an activation from which several threads are faster than one
COMPILED_AFTER = 1 << 24  # elements that PyTorch computes before a kernel is compiled, which takes some 50 ms
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # of kernels
counted = Counter[str]()  # elements that PyTorch has computed, by the name of the kernel


@cache
def emitter(name: str) -> Any:
    """Import the module `onward.kernels.llvm.<name>`, which emits the code of kernels, and return it; the import loads
    the compiler, so it is deferred until a kernel is needed."""
    return importlib.import_module(f"onward.kernels.llvm.{name}")


def takes_kernels(x: Tensor) -> bool:
    """Return whether a CPU kernel without gradients may compute a result from x: the kernel can read x, and neither
    gradients nor autocast are enabled."""
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and kernels_can_read(x)


def kernels_can_read(x: Tensor) -> bool:
    """Return whether CPU kernels can read x: x is a plain tensor in the memory of a CPU, and no tracer, mode or
    transform has to see the operations of PyTorch."""
    return not is_watched() and type(x) is Tensor and torch._C._dispatch_keys(x).raw_repr() in plain_keys()


def is_watched() -> bool:
    """Return whether a tracer, mode or transform (torch.compile, vmap, a FLOP counter, ...) sees the operations of
    PyTorch now. It would miss the work of kernels and compiled decoding steps, which are then not used."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()  # such as a counter of FLOPs, or fake tensors
        or torch._C._len_torch_function_stack()  # such as torch.set_default_device
        or torch._C._is_tracing()  # torch.jit.trace
        or torch._C._functorch.peek_interpreter_stack() is not None  # vmap, grad, jvp, functionalize
        or forward_ad._current_level >= 0
    )


def is_recorded() -> bool:
    """Return whether the operations of a decoding step are being recorded, for a compiled step that will repeat them by
    kernels."""
    return not torch.compiler.is_compiling() and getattr(_get_current_dispatch_mode(), "records_steps", False)


def unrecorded() -> AbstractContextManager[object]:
    """Return a context whose results are constants of a decoding step if the step is being recorded: their operations
    are not recorded."""
    return torch._C._DisableTorchDispatch() if is_recorded() else nullcontext()


@cache
def plain_keys() -> frozenset[int]:
    """Return the dispatch key sets (as numbers) of plain dense tensors in the memory of a CPU. Kernels can read a
    tensor with one of these; a subclass, a sparse or nested layout, a wrapper of a transform, or lazy negation has
    another."""
    with torch.inference_mode(False):
        keys = [torch._C._dispatch_keys(torch.empty(0, device="cpu", dtype=torch.float32)).raw_repr()]
    with torch.inference_mode():
        keys.append(torch._C._dispatch_keys(torch.empty(0, device="cpu", dtype=torch.float32)).raw_repr())
    return frozenset(keys)


def is_worth(name: str, x: Tensor) -> bool:
    """Return whether the CPU kernel `name` should compute an activation from x, in place of PyTorch.

    x must be large, and either gradients are needed, or PyTorch has computed so many elements that compiling pays. With
    gradients the kernel is used from the first step on, so that a resumed run gives the same bits.
    """
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
    """Call a CPU kernel that writes a tensor with the shape and dtype of x, its first input; return this tensor.
    `others` are further inputs; `items` is the number of pieces of work, such as rows, that threads divide."""
    y, target = buffer(x.shape, x.dtype)
    launch(kernel, target, x, *others, items=items)
    return y


def launch(kernel: Callable[..., None], *arguments: Tensor | int, items: int) -> None:
    """Call a CPU kernel with `arguments`, contiguous tensors (passed by address) or numbers, in the order of the
    kernel's arguments. `items` is the number of pieces of work, such as rows, that threads divide."""
    values = (address(each, each.dtype, *each.shape) if isinstance(each, Tensor) else each for each in arguments)
    kernel(*values, items, torch.get_num_threads())
