"""Causal self-attention over windows in training: one kernel for the forward pass, one for the gradients.

Shapes: B windows, T tokens of each, H heads, E d_head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from onward.kernels.memory import DTYPES, address, buffer, fits, strided_address
from onward.kernels.operations import is_worth, kernels_can_read

LANES = 16  # number of tokens and head size are multiples of it


def takes_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in (q, k, v)) or not q.dim() == k.dim() == 4:
        return False
    (rows, tokens, heads, width), kv_heads = q.shape, k.size(2)
    return (
        tokens % LANES == width % LANES == 0
        and kv_heads > 0
        and heads % kv_heads == 0
        and 2 * rows * kv_heads >= torch.get_num_threads()  # threads divide windows and key/value heads
        and all(fits(each, q.dtype, rows, tokens, kv_heads, width) and kernels_can_read(each) for each in (k, v))
        and is_worth("causal", q)
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return CausalAttention.apply(q, k, v, scale)  # type: ignore[no-any-return]


class CausalAttention(torch.autograd.Function):
    """The autograd function of `causal_attention`: one kernel computes the output, another the gradients of q, k and
    v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        from onward.kernels.llvm import causal

        rows, tokens, heads, width = q.shape
        q, k, v = map(with_tokens, (q, k, v))
        ctx.shape = causal.Causal(heads, k.size(2), width, DTYPES[q.dtype], scale)
        y, target = buffer(q.shape, q.dtype)
        statistics, of_queries = buffer((rows, heads, 2, tokens), torch.float32)
        launch(causal.causal(ctx.shape), ctx.shape, (q, k, v), target, of_queries)
        ctx.save_for_backward(q, k, v, statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from onward.kernels.llvm import causal

        q, k, v, statistics = ctx.saved_tensors
        grad = grad.contiguous()
        outputs = [buffer(x.shape, x.dtype) for x in (q, k, v)]
        operands = address(grad, q.dtype, *q.shape), address(statistics, torch.float32, *statistics.shape)
        targets = (target for _, target in outputs)
        launch(causal.causal_gradient(ctx.shape), ctx.shape, (q, k, v), *targets, *operands)
        return *(output for output, _ in outputs), None


def with_tokens(x: Tensor) -> Tensor:
    """Return x (B, T, H, E), or a copy of it, in a layout that the kernel can read: contiguous heads, all tokens
    equally far apart."""
    rows, tokens, heads, width = x.shape
    of_row, of_token, of_head, of_number = x.stride()
    heads_are_contiguous = of_number == 1 and (of_head == width or heads == 1)
    return x if heads_are_contiguous and (of_row == tokens * of_token or rows == 1) else x.contiguous()


def launch(kernel: Any, shape: Any, inputs: tuple[Tensor, ...], *outputs: int) -> None:
    """Call a kernel for q, k and v of `with_tokens`; `outputs` are the addresses of its first arguments."""
    (rows, tokens, _, _), threads = inputs[0].shape, torch.get_num_threads()
    _scratch, numbers = buffer((threads, shape.scratch(tokens)), torch.float32)
    strides = (x.stride(1) for x in inputs)
    kernel(*outputs, *map(strided_address, inputs), *strides, tokens, numbers, rows * shape.kv_heads, threads)
