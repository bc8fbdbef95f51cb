"""The training loop: windows in, better weights out.

Shapes: B windows, T tokens of each, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.errors import UserError
from onward.model.decoder import without_dropout

IGNORED = -1


@dataclass(frozen=True)
class Batch:
    """Windows for one forward and backward."""

    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, T), the token after each; IGNORED where there is nothing to learn

    @classmethod
    def of(cls, windows: Tensor) -> "Batch":
        """From windows (B, T + 1), which have IGNORED behind the end of a text."""
        return cls(windows[:, :-1].clamp(min=0), windows[:, 1:])


@dataclass(frozen=True)
class Step:
    """What one optimiser step did."""

    step: int  # counted from 1
    loss: float  # mean over the targets, nats per token
    learning_rate: float
    grad_norm: float  # before clipping
    tokens: int  # targets in this step
    seconds: float


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the cross-entropies of the targets, in nats, computed in at least fp32."""
    logits = model(batch.tokens)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")


def mixed(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which the model computes: products in bf16, or everything as it is."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def fit(
    model: nn.Module,
    batches: Callable[[int], list[Batch]],
    optimiser: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
    steps: range,
    *,
    clip: float,
    precision: str,
) -> Iterator[Step]:
    """Train for `steps`, yielding after each; `batches(step)` are the windows that make the step's gradient.

    The loss is the mean over all targets of the step, so accumulating over batches changes nothing but rounding. A
    loss or gradient that is not finite is a UserError, raised before it reaches the weights.
    """
    device = next(model.parameters()).device
    model.train()
    for step in steps:
        start = perf_counter()
        parts = batches(step)
        count = sum(int((part.targets != IGNORED).sum()) for part in parts)
        total = 0.0
        for part in parts:
            with mixed(precision, device):
                loss = loss_sum(model, part) / count
            loss.backward()
            total += loss.item()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")))
        if not total < float("inf") or not norm < float("inf"):
            raise UserError(
                f"step {step + 1} has loss {total} and gradient norm {norm}: the last save is good; start again with a "
                "lower learning rate"
            )
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step)
        optimiser.step()
        optimiser.zero_grad()
        yield Step(step + 1, total, learning_rate(step), norm, count, perf_counter() - start)


@torch.inference_mode()
def mean_loss(model: nn.Module, batches: Iterable[Batch], precision: str = "fp32") -> tuple[float, int]:
    """The mean cross-entropy of all targets, in nats per token, and how many they are."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for batch in batches:
        with without_dropout(model), mixed(precision, device):
            total += loss_sum(model, batch).item()
        count += int((batch.targets != IGNORED).sum())
    return total / count, count
