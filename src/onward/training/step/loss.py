"""Losses. The cross-entropy computes logits in chunks if all logits at once would need too much memory.

Shapes: B windows, T tokens of each, N = B * T, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from onward.base.arguments import checked, explained
from onward.base.errors import UserError
from onward.data.windows import IGNORE_INDEX, Batch
from onward.model.adapters import rows_differ
from onward.model.decoder import Decoder, without_dropout
from onward.model.divided import inside, rows_at_once, scores
from onward.training.step.precision import autocast
from onward.training.step.sums import Sums, two_sums

LossFunction = Callable[[Any, Any], Sums]  # function of a model and a batch, see `Loss`


class Loss:
    """Base class of losses. A subclass implements `__call__`, which returns the sums over a batch, and may override the
    other methods.

    The trainer divides each sum by the total `divisor` of the batches of a step: the number of targets, unless the
    batch class defines another one. `uses_all` says whether each batch gives all trainable parameters a gradient, so
    that processes need not search for unused parameters. `of_batches` says whether the saved state belongs to the
    batches of a process, so that each process has its own.
    """

    uses_all: ClassVar[bool] = False
    of_batches: ClassVar[bool] = False

    def __call__(self, model: Any, batch: Any) -> Sums:
        """Return two sums over the batch's targets: the loss to minimize, with gradient, and the loss to report,
        without gradient. An optional third element is a dict of further sums to report."""
        raise NotImplementedError

    def prepare(self, model: Any, batches: Sequence[Any]) -> Sequence[Any]:
        """Return the batches to train on in a step, given the `batches` of the data; by default the same. Reinforcement
        learning replaces prompts by completions sampled from `model`."""
        return batches

    def divide(self, divide: Callable[[Decoder], object]) -> None:
        """Shard the models that the loss contains, such as a teacher, over the processes: each model is loaded with
        deferred weights (see `model/deferred.py`); then `divide(model)` shards it in place, like the trained model, and
        reads its weights. By default a loss contains no models."""

    def summarize(self, figures: dict[str, float]) -> dict[str, float]:
        """Return the figures to report in a step, by name. `figures` are the means of the further sums that `__call__`
        returned; by default these are reported unchanged."""
        return figures

    @property
    def samples(self) -> Sequence[Mapping[str, Any]]:
        """A dict for each text generated in the last step, for the run's samples.jsonl; by default none."""
        return ()

    def state(self) -> Mapping[str, Tensor]:
        """Return the tensors of the loss that are saved with a run, by name; by default none. All processes return
        equal tensors, or shards of the same tensors (DTensors), unless the class sets `of_batches`."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the tensors that `state` returned, or the initial state if empty; does nothing by default."""


@dataclass(frozen=True)
class LossOfFunction(Loss):
    """A Loss that calls a user's function (model, batch) -> sums; for the sums see `Loss.__call__`."""

    function: LossFunction

    def __call__(self, model: Any, batch: Any) -> Sums:
        return two_sums(self.function(model, batch), self.function)


OPTIONAL = "prepare", "divide", "summarize", "samples", "state", "load_state"  # methods of a Loss


def as_loss(loss: Loss | LossFunction) -> Loss:
    """Make a Loss from a function (model, batch) -> sums; a Loss is returned unchanged. Raises a UserError for an
    object that is not a Loss but has its methods, since they would not be called."""
    if isinstance(loss, Loss):
        return loss
    if own := [name for name in OPTIONAL if hasattr(loss, name)]:
        raise UserError(
            f"Cannot call {own[0]} of the loss {type(loss).__name__}, because it is not a Loss: make it a subclass of "
            "onward.Loss"
        )
    return LossOfFunction(loss)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """The loss of language models: the cross-entropy of a batch's targets, in nats, summed over the targets."""

    uses_all: ClassVar[bool] = True
    z_loss: float = 0.0  # weight of (log Z)^2, Z being the softmax's denominator (PaLM, Chowdhery et al. 2022)
    label_smoothing: float = 0.0  # share of each target spread over the vocabulary (Szegedy et al. 2016, section 7)
    chunk: int = 0  # number of tokens whose logits are in memory at once; 0: as many as fit in 128 MiB in fp32

    @classmethod
    def of(cls, options: Any) -> Self:
        """Make the loss of a RunConfig, or of other options with its fields `z_loss`, `label_smoothing` and
        `loss_chunk`."""
        return cls(z_loss=options.z_loss, label_smoothing=options.label_smoothing, chunk=options.loss_chunk)

    @explained
    def __call__(self, model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum to minimize and, without gradient, the plain cross-entropy, both in at least fp32.

        If the batch has more tokens than one chunk, logits (N, V) and their gradients are computed chunk by chunk in
        the forward pass. `batch.loss_scale` keeps the gradients of fp16 in range.
        """
        hidden, targets = model.hidden(batch.tokens, batch.positions).flatten(0, 1), batch.targets.flatten()
        loss = partial(self.of_hidden, model)
        chunks = -(-len(targets) // (self.chunk or rows_at_once(model.head.out_features)))
        if chunks <= 1 or rows_differ(model.embed_out) or rows_differ(model.head):  # chunks would divide rows
            return loss(hidden, targets)
        head = [p for part in (model.embed_out, model.head) for p in part.parameters() if p.requires_grad]
        return InChunks.apply(loss, batch.loss_scale, chunks, targets, hidden, *head * torch.is_grad_enabled())

    def of_hidden(self, model: Decoder, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss to minimize and the plain cross-entropy, both summed over the targets (N,), from hidden
        states (N, D), with all logits in memory at once."""
        of_tokens = scores(model, hidden)
        plain = loss = of_tokens.cross_entropy(targets, IGNORE_INDEX)
        if self.label_smoothing or self.z_loss:
            extra = self.z_loss * of_tokens.log_z.square()
            if self.label_smoothing:  # cross-entropy with a uniform target over the vocabulary
                extra = extra + self.label_smoothing * (of_tokens.log_z - of_tokens.mean)
            loss = (1 - self.label_smoothing) * plain + (extra * (targets != IGNORE_INDEX)).sum()
        return loss, plain.detach()


@dataclass(frozen=True)
class Means:
    """The means of a loss and of its figures over batches; `divisor` is the number that the sums were divided by,
    usually the number of targets."""

    loss: float
    divisor: int
    figures: dict[str, float]


@torch.no_grad()  # not inference_mode: training reuses weights that FSDP gathers here, and cannot use inference tensors
def mean_figures(model: Decoder, batches: Iterable[Batch], loss: Loss, precision: str = "fp32") -> Means:
    """Compute the means of a loss and of its figures over all batches, without gradients or dropout; used by
    validation."""
    total, count, figures = 0.0, 0, defaultdict[str, float](float)
    for batch in batches:
        with without_dropout(model), autocast(precision, model.device):
            _, reported, *more = inside(model, loss, model, batch)
        total += reported.item()
        for name, value in more[0].items() if more else ():
            figures[name] += value.item()
        count += batch.divisor
    share = 1 / max(1, count)
    return Means(total * share, count, loss.summarize({name: value * share for name, value in figures.items()}))


@checked
def mean_loss(model: Decoder, batches: Iterable[Batch], precision: str = "fp32") -> tuple[float, int]:
    """Compute the mean cross-entropy of all targets of the batches, in nats per token; return it and the number of
    targets."""
    means = mean_figures(model, batches, CrossEntropy(), precision)
    return means.loss, means.divisor


class InChunks(torch.autograd.Function):
    """The autograd function of a loss that is computed chunk by chunk: the gradients of a chunk are computed in the
    forward pass, so that its logits can be freed."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        scale: float,
        chunks: int,
        targets: Tensor,
        hidden: Tensor,
        *head: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute `loss`, a function of hidden states (N, D) and targets (N,), in `chunks` chunks, and return the sums
        of its two results; `head` are the trainable parameters between hidden states and logits. Gradients are computed
        for the first result times `scale`, which keeps them in the range of fp16."""
        exact = torch.promote_types(hidden.dtype, torch.float32)
        sums = hidden.new_zeros(2, dtype=exact)
        of_hidden = torch.empty_like(hidden)
        of_head = [torch.zeros_like(p, dtype=exact) for p in head]
        for h, t, of_h in zip(*(x.chunk(chunks) for x in (hidden, targets, of_hidden))):
            h = h.detach().requires_grad_(hidden.requires_grad)
            leaves = [*head, h] if h.requires_grad else head
            with torch.enable_grad():
                both = loss(h, t)
                scaled = both[0] * scale
            sums += torch.stack(both).detach()
            is_used = leaves and scaled.requires_grad
            grads: Any = torch.autograd.grad(scaled, leaves, allow_unused=True) if is_used else [None] * len(head)
            for total, grad in zip(of_head, grads):
                total += 0 if grad is None else grad
            if h.requires_grad:
                of_h.copy_(grads[-1])
        ctx.save_for_backward(of_hidden, *(None if grad is None else total for total, grad in zip(of_head, grads)))
        ctx.scale = scale
        ctx.mark_non_differentiable(plain := sums[1])
        return sums[0], plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *(t if t is None else t * (grad / ctx.scale) for t in ctx.saved_tensors)
