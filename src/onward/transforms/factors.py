"""Low-rank factors of weights, to initialize adapters.

Shapes: I inputs, O outputs, R rank; a stack of matrices has an additional first dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.config.lora import EVA, Initialization, OLoRA, PiSSA

OVERSAMPLED = 8  # additional singular values in a randomized SVD, which make the needed ones more accurate


def principal(weight: Tensor, rank: int, scaling: float, iterations: int = 0) -> tuple[Tensor, Tensor]:
    """Return A (R, I) and B (O, R), the initial values of an adapter of rank R by PiSSA: `scaling` times B A is the
    best rank-R approximation of the weight (O, I), and A and B are its singular vectors, each times sqrt(singular value
    / `scaling`). With `iterations` > 0, they are computed by a randomized SVD with this number of power iterations."""
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if iterations:
        u, s, v = torch.svd_lowrank(exact, min(rank + OVERSAMPLED, *exact.shape[-2:]), iterations)
        vh = v.mT
    else:
        u, s, vh = torch.linalg.svd(exact, full_matrices=False)
    root = (s[..., :rank] / scaling).sqrt()
    return root[..., None] * vh[..., :rank, :], u[..., :rank] * root[..., None, :]


def orthonormal(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A (R, I) and B (O, R) by OLoRA: the first rows of R and columns of Q in the QR decomposition of the weight (O,
    I)."""
    q, r = torch.linalg.qr(weight.to(torch.promote_types(weight.dtype, torch.float32)))
    return r[..., :rank, :], q[..., :rank]


def parts_of(weight: Tensor, init: Initialization, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """A (R, I) and B (O, R), the factors of a part of the weight (O, I); `scaling` is the factor of B A in the
    adapter's output."""
    if isinstance(init, PiSSA):
        return principal(weight, rank, scaling, init.iterations)
    if isinstance(init, OLoRA):
        return orthonormal(weight, rank)
    assert init.factors is not None
    a, b = init.factors(weight, rank, scaling)
    return a, b


def check_rank(init: Initialization | None, rank: int, weight: Tensor, name: str) -> None:
    """Raise a UserError if an initialization does not support this rank for the weight called `name`."""
    if init is None:
        return
    if init.factors is None and not isinstance(init, PiSSA | OLoRA | EVA):
        raise UserError(f"{type(init).__name__} lacks the method factors, which returns A and B: define this method")
    inputs = isinstance(init, EVA)
    if rank > (most := weight.size(-1) if inputs else min(weight.shape[-2:])):
        has = f"has {most} inputs" if inputs else f"has at most rank {most}"
        raise UserError(
            f"Cannot initialize {name} with {init.kind} and rank {rank}, because it {has}: choose at most {most}"
        )
