"""The cross-entropy of many logits: one kernel for the losses and, if needed, their gradient.

Shapes: N targets, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from onward.kernels.available import unavailable
from onward.kernels.memory import DTYPES, address, buffer, fits
from onward.kernels.operations import kernels_can_read

MIN_KERNEL = 1 << 18  # minimum number of logits for which compiling a kernel (about 50 ms) saves time


def plain_cross_entropy(logits: Tensor, targets: Tensor, ignored: int, reduction: str = "sum") -> Tensor:
    """Compute `cross_entropy` by PyTorch in at least fp32; with `reduction` "none", return the cross-entropy of each
    row (N,)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=ignored, reduction=reduction)


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The sum of the cross-entropies of logits (N, V) for targets (N,), 0 for targets equal to `ignored`."""
    if logits.requires_grad and takes_kernel(logits, targets, ignored):
        return KernelCrossEntropy.apply(logits, targets, ignored)  # type: ignore[no-any-return]
    if not torch.is_grad_enabled() and takes_kernel(logits, targets, ignored):
        return by_kernel(logits, targets, ignored).sum()
    return plain_cross_entropy(logits, targets, ignored)


def cross_entropies(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The cross-entropy of each row (N,), without a gradient; `cross_entropy` is their sum."""
    with torch.no_grad():
        if takes_kernel(logits, targets, ignored):
            return by_kernel(logits, targets, ignored)
        return plain_cross_entropy(logits, targets, ignored, "none")


def takes_kernel(logits: Tensor, targets: Tensor, ignored: int) -> bool:
    """Whether the kernel can be used for these logits (N, V). Targets outside the vocabulary are left to PyTorch, which
    raises."""
    if logits.numel() < MIN_KERNEL or logits.dtype not in DTYPES or logits.dim() != 2:
        return False
    if not kernels_can_read(logits) or not fits(targets, torch.int64, len(logits)) or unavailable():
        return False
    return bool(((targets >= 0) & (targets < logits.size(1)) | (targets == ignored)).all())


def by_kernel(
    logits: Tensor, targets: Tensor, ignored: int, gradient: tuple[Tensor, int] | tuple[None, int] = (None, 0)
) -> Tensor:
    """The cross-entropies (N,), by the kernel. It also writes the gradient of their sum to `gradient`, a pair of a
    tensor (N, V) and its address; (None, 0) computes no gradient."""
    from onward.kernels.llvm import cross_entropy as kernels

    logits, targets = logits.contiguous(), targets.contiguous()
    rows, width = logits.shape
    losses, of_rows = buffer((rows,), torch.float32)
    operands = address(logits, logits.dtype, rows, width), address(targets, torch.int64, rows)
    with_gradient = gradient[0] is not None
    kernel = kernels.cross_entropy(width, DTYPES[logits.dtype], ignored, with_gradient)
    kernel(of_rows, gradient[1], *operands, rows, torch.get_num_threads())
    return losses


class KernelCrossEntropy(torch.autograd.Function):
    """The autograd function of `cross_entropy`: a kernel computes the loss and, in the same pass, its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        gradient = buffer(logits.shape, logits.dtype)
        ctx.save_for_backward(gradient[0])
        return by_kernel(logits, targets, ignored, gradient).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * grad, None, None
