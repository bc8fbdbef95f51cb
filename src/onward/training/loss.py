"""What training minimizes: the cross-entropy of the targets, in chunks where all logits would fill the memory.

Shapes: B windows, T tokens of each, N = B * T, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from onward.data.windows import IGNORE_INDEX, Batch
from onward.model.decoder import Decoder

LOGITS = 1 << 25  # that stand in memory at once: 128 MiB in fp32


@dataclass(frozen=True)
class Objective:
    """What is minimized, and how much of it is computed at once."""

    z_loss: float = 0.0  # times the square of log Z, Z being the softmax's denominator (PaLM, Chowdhery et al. 2022)
    label_smoothing: float = 0.0  # share of each target spread over the vocabulary (Szegedy et al. 2016, section 7)
    chunk: int = 0  # tokens whose logits stand in memory at once; 0: so many that they take at most 128 MiB in fp32


def loss_sum(
    model: Decoder, batch: Batch, objective: Objective = Objective(), factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The sum over the targets of what is minimized and, without gradient, of the cross-entropy, in nats.

    `factor` is about what the sum will be multiplied by: gradients that are made in chunks are made of that, which
    keeps those in fp16 in its range.
    Computed in at least fp32. Where the logits (N, V) are more than a chunk, they are made chunk by chunk.
    """
    hidden = model.hidden(batch.tokens, batch.positions).flatten(0, 1)
    targets = batch.targets.flatten()
    loss = partial(chunk_loss, model, objective)
    chunks = -(-len(targets) // (objective.chunk or max(1, LOGITS // model.config.vocab_size)))
    if chunks <= 1:
        return loss(hidden, targets)
    head = [p for part in (model.embed_out, model.head) for p in part.parameters() if p.requires_grad]
    return InChunks.apply(loss, factor, chunks, targets, hidden, *head * torch.is_grad_enabled())


def chunk_loss(model: Decoder, objective: Objective, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What `loss_sum` returns, for hidden states (N, D) and targets (N,), through all of their logits."""
    logits = model.logits(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    plain = loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    smoothing, z_loss = objective.label_smoothing, objective.z_loss
    if smoothing or z_loss:
        log_z = logits.logsumexp(-1)
        extra = z_loss * log_z.square()
        if smoothing:  # the cross-entropy of a target spread over the whole vocabulary
            extra = extra + smoothing * (log_z - logits.mean(-1))
        loss = (1 - smoothing) * plain + (extra * (targets != IGNORE_INDEX)).sum()
    return loss, plain.detach()


class InChunks(torch.autograd.Function):
    """The loss chunk by chunk; the gradients of each are made at once, so that its logits can go."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        factor: float,
        chunks: int,
        targets: Tensor,
        hidden: Tensor,
        *head: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`loss` of hidden states (N, D) and targets (N,); `head` is what else it has gradients for."""
        exact = torch.promote_types(hidden.dtype, torch.float32)
        sums = hidden.new_zeros(2, dtype=exact)
        of_hidden = torch.empty_like(hidden)
        of_head = [torch.zeros_like(p, dtype=exact) for p in head]
        for h, t, of_h in zip(*(x.chunk(chunks) for x in (hidden, targets, of_hidden))):
            h = h.detach().requires_grad_(hidden.requires_grad)
            leaves = [*head, h] if h.requires_grad else head
            with torch.enable_grad():
                both = loss(h, t)
                scaled = both[0] * factor
            sums += torch.stack(both).detach()
            grads = torch.autograd.grad(scaled, leaves) if leaves else ()
            for total, grad in zip(of_head, grads):
                total += grad
            if h.requires_grad:
                of_h.copy_(grads[-1])
        ctx.save_for_backward(of_hidden, *of_head)
        ctx.factor = factor
        minimized, plain = sums.unbind()
        ctx.mark_non_differentiable(plain)
        return minimized, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *(total * (grad / ctx.factor) for total in ctx.saved_tensors)
