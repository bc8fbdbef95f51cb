"""The training loop: windows in, better weights out.

Shapes: B windows, T tokens of each, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import nn

from onward.data.windows import Batch
from onward.model.decoder import Decoder, without_dropout
from onward.training.balance import Balance
from onward.training.loss import Objective, loss_sum
from onward.training.processes import Processes


@dataclass(frozen=True)
class Step:
    """What one optimizer step did or, in `failure`, why it was not made."""

    step: int  # counted from 1
    loss: float  # mean cross-entropy over the targets, nats per token
    learning_rate: float
    grad_norm: float  # before clipping
    tokens: int  # targets in this step
    seconds: float
    failure: str = ""
    figures: dict[str, float] = field(default_factory=dict)  # other things measured, such as the load of experts


@dataclass(frozen=True)
class StepConfig:
    """How gradients are made and used."""

    objective: Objective = Objective()
    clip: float = 0.0  # the greatest norm of the gradient; 0: any
    precision: str = "fp32"
    check_step: Callable[[float, float], str] = lambda loss, norm: ""  # why it must not be made
    balance: Balance | None = None
    processes: Processes = Processes()

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """What keeps the gradients of fp16 from vanishing (Micikevicius et al. 2018, section 3.2)."""
        return torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")


PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mixed(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which the model computes: products in bf16 or fp16, or everything as it is."""
    return torch.autocast(device.type, PRECISIONS[precision]) if precision in PRECISIONS else nullcontext()


def fit(
    model: Decoder,
    source: Iterable[tuple[int, list[Batch]]],
    optimizers: Sequence[torch.optim.Optimizer],
    learning_rate: Callable[[int], float],
    method: StepConfig = StepConfig(),
    scaler: torch.amp.GradScaler | None = None,
) -> Iterator[Step]:
    """Train on what `source` gives, the number of a step (from 0) and the windows that make its gradient, yielding
    after each step. It is asked for the next when the caller has dealt with the one before.

    The loss is the mean over all targets of the step in all processes, so accumulating over batches changes nothing but
    rounding (and the auxiliary loss of experts, which is taken batch by batch). A step that `method.check_step`
    refuses leaves weights and optimizers as they were.
    """
    device, everyone, balance = model.device, method.processes, method.balance
    scaler = scaler or method.scaler(device)
    model.train()
    for step, parts in source:
        start = perf_counter()
        counts = [part.num_targets for part in parts]
        count = max(1, *everyone.sum([sum(counts)]))
        factor = scaler.get_scale() / count if scaler.is_enabled() else 1.0
        cross_entropies = []
        for part, own in zip(parts, counts):
            torch.manual_seed(part.seed)  # dropout is a function of the windows, wherever they are computed
            with mixed(method.precision, device):
                objective, cross_entropy = loss_sum(model, part, method.objective, factor)
            loss = objective / count
            if balance is not None:
                loss = loss + balance.auxiliary() * (own / count)
            scaler.scale(loss).backward()
            cross_entropies.append(cross_entropy)
        everyone.sum_gradients(model)
        mean = everyone.sum([sum(cross_entropy.item() for cross_entropy in cross_entropies)])[0] / count
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), method.clip or float("inf")))
        # fp16 overflows now and then: the scaler leaves such a step out and scales less, as long as that can help
        failure = method.check_step(mean, 0.0 if scaler.is_enabled() and scaler.get_scale() >= 1 else norm)
        rate, figures = learning_rate(step), {}
        for optimizer in [] if failure else optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            scaler.step(optimizer)
        scaler.update()
        if balance is not None:
            everyone.sum_tensors(balance.counts)
            figures = balance.loads()
            balance.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        yield Step(step + 1, mean, rate, norm, int(count), perf_counter() - start, failure, figures)


@torch.inference_mode()
def mean_loss(model: Decoder, batches: Iterable[Batch], precision: str = "fp32") -> tuple[float, int]:
    """The mean cross-entropy of all targets, in nats per token, and how many they are."""
    total, count = 0.0, 0
    for batch in batches:
        with without_dropout(model), mixed(precision, batch.tokens.device):
            total += loss_sum(model, batch)[1].item()
        count += batch.num_targets
    return total / max(1, count), count
