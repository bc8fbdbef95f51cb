"""The operations of a plain decoder in PyTorch, which kernels replace where that pays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.config.feedforward_parts import ActivationName


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


def plain_gate(x: Tensor, y: Tensor, activation: ActivationName) -> Tensor:
    return ACTIVATIONS[activation](x) * y


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
    """x (..., width) / sqrt(mean(x ** 2) + eps) * (weight + offset), computed in at least fp32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    weight = weight.to(exact)
    return F.rms_norm(x.to(exact), weight.shape, weight + offset if offset else weight, eps).to(dtype)


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate element i of each head of x (B, T, H, E) with element i + half, by angles with these cosines and sines,
    each (B or 1, T, 1, half); elements from 2 * half on stay."""
    half = cos.size(-1)
    a, b, rest = x.split([half, half, x.size(-1) - 2 * half], -1)
    rotated = [(a * cos - b * sin).type_as(x), (b * cos + a * sin).type_as(x)]
    return torch.cat([*rotated, rest] if rest.size(-1) else rotated, -1)
