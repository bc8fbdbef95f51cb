"""The operations of a plain decoder, each by a kernel if one exists and saves time, otherwise in plain PyTorch.

Kernels and their compiler are loaded when a kernel is first needed. Shapes: B batch, T tokens, H heads, E d_head, I
inputs, O outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from onward.config.feedforward_parts import ActivationName
from onward.kernels.available import unavailable
from onward.kernels.memory import DTYPES, MIN_PARALLEL, Kernel, Unreadable, address, fits, multiply

COMPILED_AFTER = 1 << 24  # elements that PyTorch computes before a kernel is compiled, which takes some 50 ms
MIN_WORK = 1 << 20  # minimum elements of the queries times slots for which compiling the attention kernel saves time
ANY = 1 << 62  # any number of rows
counted = Counter[str]()  # elements that PyTorch has computed, by the name of the kernel


def squared_relu(x: Tensor) -> Tensor:
    """relu(x) ** 2 (Primer, So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": squared_relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x (..., I) with a weight (O, I) and add a bias (O,); return (..., O). For few rows a CPU kernel reads
    the weight at the speed of the memory."""
    if x.dtype is weight.dtype and weight.dim() and has_few_rows(x):
        kernel = product_kernel(DTYPES[x.dtype], x.dtype, bias is not None)
        if kernel is not None:
            with suppress(Unreadable):
                pointer = address(weight, x.dtype, len(weight), x.size(-1))
                return multiply(kernel, x, pointer, pointer, bias, len(weight))
    return F.linear(x, weight, bias)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
    """x (..., width) / sqrt(mean(x ** 2) + eps) * (weight + offset), computed in at least fp32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    weight = weight.to(exact)
    return F.rms_norm(x.to(exact), weight.shape, weight + offset if offset else weight, eps).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x ** 2) + eps) * (weight + offset), computed in at least fp32, returned in `dtype`."""
    is_read = weight.dtype in DTYPES and dtype in DTYPES and weight.is_contiguous()
    if is_read and is_worth("rms_norm", x) and fits(weight, weight.dtype, x.size(-1)):
        from onward.kernels.fused import RMSNorm

        return RMSNorm.apply(x, weight, eps, offset, dtype)  # type: ignore[no-any-return]
    return plain_rms_norm(x, weight, eps, offset, dtype)


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate element i of each head of x (B, T, H, E) with element i + half, by angles with these cosines and sines,
    each (B or 1, T, 1, half); elements from 2 * half on stay unchanged."""
    half = cos.size(-1)
    a, b, rest = x.split([half, half, x.size(-1) - 2 * half], -1)
    rotated = [(a * cos - b * sin).type_as(x), (b * cos + a * sin).type_as(x)]
    return torch.cat([*rotated, rest] if rest.size(-1) else rotated, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys x by their positions (RoFormer, Su et al. 2021), as `plain_rotate` does."""
    if x.dim() == 4 and 0 < 2 * cos.size(-1) <= x.size(-1) and is_worth("rotation", x):
        rows = len(cos) if len(cos) == 1 else len(x)
        if all(fits(table, torch.float32, rows, x.size(1), 1, cos.size(-1)) for table in (cos, sin)):
            from onward.kernels.fused import Rotation

            return Rotation.apply(x, cos, sin)  # type: ignore[no-any-return]
    return plain_rotate(x, cos, sin)


def plain_gate(x: Tensor, y: Tensor, activation: ActivationName) -> Tensor:
    return ACTIVATIONS[activation](x) * y


def gate(x: Tensor, y: Tensor, activation: ActivationName) -> Tensor:
    """activation(x) * y, as in a gated feed-forward (GLU variants, Shazeer 2020)."""
    if is_worth("gate", x) and all(fits(each, x.dtype, *x.shape) and each.is_contiguous() for each in (x, y)):
        from onward.kernels.fused import Gate

        return Gate.apply(x, y, activation)  # type: ignore[no-any-return]
    return plain_gate(x, y, activation)


def attention_kernel(q: Tensor, entries: Sequence[Tensor], slots: int) -> Callable[..., Tensor] | None:
    """The function `cached_attention.attend` if the CPU kernel can compute the attention of queries q (B, T, H, E),
    each of which sees up to `slots` positions, to a contiguous or paged KV cache; else None. `entries` are the keys and
    values or, in a quantized cache, their scales."""
    if q.numel() * slots < MIN_WORK or q.dtype not in DTYPES or any(entry.dtype != q.dtype for entry in entries):
        return None
    if not takes_kernels(q) or unavailable():
        return None
    from onward.kernels.cached_attention import attend

    return attend


def has_few_rows(x: Tensor, weight_format: str = "") -> bool:
    return takes_kernels(x) and x.dim() > 0 and 0 < x.numel() <= max_rows(x.dtype, weight_format) * x.size(-1)


@cache
def max_rows(dtype: torch.dtype, weight_format: str = "") -> int:
    """The largest number of rows of x for which the CPU kernel for a weight in `weight_format` ("": unquantized) is at
    least as fast as PyTorch; 0 in dtypes without a kernel."""
    cpu = torch.cpu.get_capabilities()
    if dtype == torch.bfloat16 and cpu.get("avx512_bf16"):
        return {"int8": 768, "int4": ANY}.get(weight_format, 256) if cpu.get("amx_tile") else ANY
    if dtype == torch.float32 and cpu.get("avx512_f"):  # MKL, PyTorch's library, uses half of AMD's vector width
        return ANY if str(cpu.get("cpu_name", "")).startswith("AMD") else 512 if weight_format else 48
    return {torch.float32: 32, torch.bfloat16: 4}.get(dtype, 0)


@cache
def product_kernel(weight_format: str, dtype: torch.dtype, biased: bool) -> Kernel | None:
    """The kernel that multiplies x in `dtype` with a weight in `weight_format` (float32, bfloat16, int8 or int4) and
    adds a bias if `biased`; None if this machine has no kernels."""
    if unavailable():
        return None
    from onward.kernels.llvm.products import products

    return products(weight_format, DTYPES[dtype], biased)


def is_worth(name: str, x: Tensor) -> bool:
    """Whether the CPU kernel `name` should compute an activation from x, in place of PyTorch.

    x must be large, and either gradients are enabled, or PyTorch has computed so many elements that compiling saves
    time. With gradients the kernel is used from the first step on, so that a resumed run gives the same bits.
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


def takes_kernels(x: Tensor) -> bool:
    """Whether a CPU kernel without gradients may compute a result from x."""
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and kernels_can_read(x)


def kernels_can_read(x: Tensor) -> bool:
    """Whether x is a plain tensor in the memory of a CPU, and no tracer, mode or transform has to see the operations of
    PyTorch."""
    return not is_watched() and type(x) is Tensor and torch._C._dispatch_keys(x).raw_repr() in plain_keys()


def is_watched() -> bool:
    """Whether a tracer, mode or transform (torch.compile, vmap, a FLOP counter, ...) sees the operations of PyTorch
    now. Kernels and compiled decoding steps are then not used, since it would not see their work."""
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
    """The dispatch key sets (as numbers) of plain dense tensors in the memory of a CPU; a subclass, a sparse or nested
    layout, a wrapper of a transform, or lazy negation has a different set."""
    with torch.inference_mode(False):
        keys = [torch._C._dispatch_keys(torch.empty(0, device="cpu", dtype=torch.float32)).raw_repr()]
    with torch.inference_mode():
        keys.append(torch._C._dispatch_keys(torch.empty(0, device="cpu", dtype=torch.float32)).raw_repr())
    return frozenset(keys)
