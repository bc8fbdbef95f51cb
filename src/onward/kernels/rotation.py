"""Rotary positions: a kernel that rotates queries and keys (RoFormer, Su et al. 2021), and rotates their gradients
back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from onward.kernels.memory import fits
from onward.kernels.rules import DTYPES, emitter, is_worth, run


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * half elements of each head of x (B, T, H, E), queries or keys, by their positions: element i
    with element i + half, by angles with these cosines and sines, each (B or 1, T, 1, half)."""
    half = cos.size(-1)
    a, b, rest = x.split([half, half, x.size(-1) - 2 * half], -1)
    rotated = [(a * cos - b * sin).type_as(x), (b * cos + a * sin).type_as(x)]
    return torch.cat([*rotated, rest] if rest.size(-1) else rotated, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys x (B, T, H, E) by their positions (rotary embedding) as `plain_rotate` does, on a CPU by a
    kernel if x is large enough."""
    if takes_kernel(x, cos, sin):
        return Rotation.apply(x, cos, sin)  # type: ignore[no-any-return]
    return plain_rotate(x, cos, sin)


def takes_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the CPU kernel, not PyTorch, rotates the queries or keys x."""
    if x.dim() != 4 or not 0 < 2 * cos.size(-1) <= x.size(-1) or not is_worth("rotation", x):
        return False
    rows = len(cos) if len(cos) == 1 else len(x)
    return all(fits(table, torch.float32, rows, x.size(1), 1, cos.size(-1)) for table in (cos, sin))


class Rotation(torch.autograd.Function):
    """The autograd function of `rotate`: a kernel rotates x and, in the backward, rotates the gradient by the negative
    angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return by_kernel(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return by_kernel(grad, cos, -sin), None, None


def by_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys x (B, T, H, E) by the CPU kernel, as `plain_rotate` does, without support of gradients."""
    kernel = emitter("fused").rotation(x.size(2), x.size(3), cos.size(-1), DTYPES[x.dtype])
    tables = (table.expand(len(x), -1, -1, -1).contiguous() for table in (cos, sin))
    return run(kernel, x.contiguous(), *tables, items=x.size(0) * x.size(1))
