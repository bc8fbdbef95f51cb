"""The trainer makes optimizer steps on batches, in memory; run.py manages the folder of a run.

Shapes: B windows, T tokens of each, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onward.base.alone import Alone
from onward.base.arguments import check_fields, checked, explained, named
from onward.base.errors import UserError
from onward.base.limits import keep_freed_memory
from onward.checkpoint.saves.state import LOSS, TrainerState, copied_to, own_state, restore, training_tensors
from onward.config.ranges import NotNegative
from onward.data.windows import Batch
from onward.training.step.average import Average
from onward.training.step.balance import Balance
from onward.training.step.health import Spikes, matrices, update_ratio
from onward.training.step.loss import CrossEntropy, Loss, LossFunction, as_loss
from onward.training.step.precision import Precision, autocast, grad_scaler

if TYPE_CHECKING:
    from onward.parallel.processes import Processes


@named
@dataclass(frozen=True)
class StepPlan:
    """The input of one optimizer step: its batches, and the numbers of their windows (training sequences). A plan does
    not depend on the state of the trainer, so it can be prefetched in another thread."""

    batches: Sequence[Batch]  # batches of this process; their gradients are accumulated
    numbers: Sequence[int] = ()  # indices of this step's windows in all processes
    next_position: int = 0  # number of the window to continue from after this step
    measure_update: bool = False  # whether to measure the relative size of the update


@dataclass(frozen=True)
class Step:
    """The result of one optimizer step: its loss, gradient norm, tokens and seconds. If the step failed, `failure` is
    the reason."""

    step: int  # counted from 1
    loss: float  # mean over the targets; for the cross-entropy, nats per token
    learning_rate: float
    grad_norm: float  # norm of the gradient before clipping
    tokens: int  # targets in this step, in all processes
    seconds: float
    failure: str = ""
    figures: dict[str, float] = field(default_factory=dict)  # other measurements, such as the load of experts


@named
@dataclass(frozen=True)
class StepConfig:
    """The settings of an optimizer step: the limit of the gradient norm, and the precision."""

    clip: NotNegative = 0.0  # maximum norm of the gradient; 0: no limit
    precision: Precision = "fp32"  # precision of matrix products

    def __post_init__(self) -> None:
        check_fields(self)


class LossModule(nn.Module):
    """A model and its loss as one module with a `forward`, so that compile, DDP and FSDP can wrap both."""

    def __init__(self, model: nn.Module, loss: Loss, balance: Balance | None) -> None:
        super().__init__()
        self.model, self.loss, self.balance = model, loss, balance

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum to minimize over the batch's targets, and a dict of the sums to report: "loss", and the
        further figures of the loss. The sum to minimize includes the auxiliary loss of experts, multiplied by the
        batch's divisor."""
        loss, reported, *figures = self.loss(self.model, batch)
        if self.balance is not None:
            loss = loss + self.balance.auxiliary() * batch.divisor
        return loss, {"loss": reported} | dict(*figures)


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seed the random generator used for dropout on a device."""
    if device.type == "cpu":  # torch.manual_seed takes 0.2 ms: it records a traceback per kind of accelerator
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


class Trainer:
    """Trains the trainable parameters of a model, a Decoder or any other module, step by step.

    >>> trainer = Trainer(model, optimizers(model, "adamw", 1e-3, 0.1, (0.9, 0.99)), lambda step: 1e-3)
    >>> for step in trainer.train(StepPlan([batch]) for batch in batches):
    ...     print(step.step, step.loss)

    `learning_rate` is a function of the step, counted from 0. `loss` is a callable of (model, batch), see loss.py, by
    default CrossEntropy(); a batch is a Batch or an instance of a subclass. `balance` and `average` must be built for
    the same model. `spikes` decides which losses fail a step, by default those that are not finite. With several
    `processes`, the model must be parallelized for their mesh. `wrap` may return another module around a LossModule; a
    wrapper that reduces gradients itself, such as DistributedDataParallel, replaces `processes`.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        learning_rate: Callable[[int], float],
        config: StepConfig = StepConfig(),
        *,
        loss: Loss | LossFunction | None = None,
        balance: Balance | None = None,
        average: Average | None = None,
        spikes: Spikes | None = None,
        processes: Alone | None = None,
        scaler: torch.amp.GradScaler | None = None,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    ) -> None:
        self.model: Any = model
        self.optimizers, self.learning_rate, self.config = optimizers, learning_rate, config
        self.balance, self.average = balance, average
        many: Any = processes if processes and processes.count > 1 else None
        self.processes: Processes | None = many
        self.spikes = spikes or Spikes(0.0)
        self.loss = as_loss(loss or CrossEntropy())
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.scaler = scaler or grad_scaler(config.precision, self.device)
        module = wrap(LossModule(model, self.loss, balance))
        self.module = many.wrapped(module, model, uses_all=self.loss.uses_all) if many else module
        self.pipeline = self.processes.pipeline(model) if self.processes else None
        self.step = 0  # steps made

    @checked
    def train(self, plans: Iterable[StepPlan]) -> Iterator[Step]:
        """Make an optimizer step for each plan, and yield its result. The next plan is requested when the caller
        requests the next step."""
        return map(self.train_step, plans)

    @explained
    def train_step(self, plan: StepPlan) -> Step:
        """Make one optimizer step.

        The gradient is that of the mean loss over all targets of the step in all processes. Accumulation over batches
        therefore changes only rounding and the auxiliary loss of experts, which is computed batch by batch. A step that
        fails leaves weights and optimizers unchanged, except the routing biases that `balance` updates.
        """
        start = perf_counter()
        if not self.model.training:
            self.model.train()
        before = [matrix.clone() for matrix in matrices(self.model, self.processes)] if plan.measure_update else []
        batches = self.loss.prepare(self.model, plan.batches)
        if not len(batches):
            raise UserError("Cannot make a step without batches: give the StepPlan at least one Batch")
        prepared = perf_counter() - start
        self.clear()  # an interrupted step or the caller may have left gradients and counts
        figures, count = self.backward(batches)
        mean = figures.pop("loss")
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = self.clip_gradients()
        # fp16 gradients may overflow: the scaler then skips the update and reduces the scale, while this can help
        overflow_is_usual = self.scaler.is_enabled() and self.scaler.get_scale() >= 1
        failure = self.spikes.check_step(mean, 0.0 if overflow_is_usual else norm)
        rate = self.learning_rate(self.step)
        for optimizer in [] if failure else self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("rate", 1.0)
            self.scaler.step(optimizer)
        self.scaler.update()
        if self.balance is not None:
            figures |= self.balance.step()
        self.clear()  # frees memory until the next step
        seconds = perf_counter() - start
        if batches is not plan.batches:
            figures["rollout_share"] = prepared / seconds
        if not failure:
            self.step += 1
            self.spikes.note(mean)
            if before:
                figures["update_ratio"] = update_ratio(before, self.model, self.processes)
            if self.average:
                self.average.update()
        return Step(self.step + bool(failure), mean, rate, norm, count, seconds, failure, figures)

    def backward(self, batches: Sequence[Batch]) -> tuple[dict[str, float], int]:
        """Compute and accumulate the gradients of a step's batches. Return a dict of the loss and its figures, each the
        mean over the batches of all processes, and the number of targets in all processes."""
        if self.processes:
            batches = [self.processes.own_tokens(batch) for batch in batches]
        counts = [sum(batch.divisor for batch in batches), sum(batch.num_targets for batch in batches)]
        count, targets = map(round, self.summed(counts))
        count = max(1, count)
        if self.pipeline:
            precision = partial(autocast, self.config.precision, self.device)
            auxiliary = self.balance.auxiliary if self.balance else float
            reported = [self.pipeline.backward(self.module, batches, count, precision, auxiliary)]
        else:
            reported = self.accumulate(batches, count)
        names = list(reported[0])
        sums = self.summed([sum(one[name].item() for one in reported) for name in names])
        return self.loss.summarize({name: value / count for name, value in zip(names, sums)}), max(1, targets)

    def accumulate(self, batches: Sequence[Batch], count: int) -> list[dict[str, Tensor]]:
        """Accumulate the gradients of batches, divided by `count`; return the loss's sums for each batch."""
        reported: list[dict[str, Tensor]] = []
        for batch in batches:
            seed_dropout(batch.seed, self.device)  # the seed depends on the windows, not on the process
            if self.scaler.is_enabled():
                batch = batch.changed(loss_scale=self.scaler.get_scale() / count)
            with self.accumulating(last=len(reported) + 1 == len(batches)):
                with autocast(self.config.precision, self.device):
                    loss, to_report = self.module(batch)
                self.scaler.scale(loss / count).backward()
            reported.append(to_report)
        return reported

    def clear(self) -> None:
        """Drop all gradients and, of a model with experts, the assignments that were counted."""
        for part in (self.model, *self.optimizers):  # an optimizer may also train parameters of a loss
            part.zero_grad()
        if self.balance is not None:
            self.balance.clear()

    def accumulating(self, *, last: bool) -> AbstractContextManager[object]:
        """Return a context manager for the backward pass of a batch; gradients are reduced only in that of the `last`
        batch."""
        if self.processes:
            return self.processes.accumulating(self.module, last=last)
        return nullcontext() if last else getattr(self.module, "no_sync", nullcontext)()

    def summed(self, values: Sequence[float]) -> Sequence[float]:
        """Return the sum of each of the `values` over all batches of a step, including those of other processes."""
        return self.processes.sum_of_batches(values) if self.processes else values

    def clip_gradients(self) -> float:
        """Scale the gradients so that their norm is at most the limit, and return their norm before scaling."""
        parameters = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        if self.processes:
            return self.processes.clip_gradients(parameters, self.config.clip, self.model)
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = float(nn.utils.get_total_norm(grads))
        if self.config.clip and norm > self.config.clip:
            torch._foreach_mul_(grads, self.config.clip / (norm + 1e-6))
        return norm

    def finite(self) -> bool:
        """Return whether all weights are finite, that is neither NaN nor infinite, in all processes."""
        if self.processes:
            return self.processes.finite(self.model)
        return all(bool(p.isfinite().all()) for p in self.model.parameters())

    def averaged(self) -> AbstractContextManager[object]:
        return self.average.shown() if self.average else nullcontext()

    def state_dict(self) -> TrainerState:
        """Return the state that a trainer needs to continue exactly: the tensors (not copied) of the trainable
        parameters and optimizers, and numbers. All processes must call this together."""
        tensors = training_tensors(self.model, self.optimizers, self.average.tensors if self.average else None)
        tensors |= self.balance.state() if self.balance else {}
        of_loss = self.loss.state()
        if self.loss.of_batches:
            own = {name: tensor.cpu() for name, tensor in of_loss.items()}
            states = self.processes.of_batches(own) if self.processes else [own]
            of_loss = {f"{i}/{name}": tensor for i, state in enumerate(states) for name, tensor in state.items()}
        tensors |= {f"{LOSS}{name}": tensor for name, tensor in of_loss.items()}
        parameters = self.processes.whole_parameters(self.model) if self.processes else self.model.named_parameters()
        return TrainerState(
            tensors,
            {
                "step": self.step,
                "frozen": [name for name, p in dict(parameters).items() if not p.requires_grad],
                "losses": self.spikes.state,
                "scaler": self.scaler.state_dict(),
                "averaged": self.average.updates if self.average else 0,
            },
        )

    @checked
    def load_state(self, state: TrainerState) -> None:
        """Load the state of a trainer that was constructed with the same arguments. Weights are copied into the model
        in place."""
        place = self.processes.divided if self.processes else copied_to
        restore(state.tensors, self.model, self.optimizers, place)
        kept = {name.removeprefix(LOSS): state.tensors[name] for name in state.tensors if name.startswith(LOSS)}
        if self.loss.of_batches:
            rank, count = (self.processes.batch_rank, self.processes.batch_count) if self.processes else (0, 1)
            kept = own_state(kept, rank, count)
        self.loss.load_state(kept, self.device)
        self.step, self.spikes.state = state.progress["step"], state.progress["losses"]
        if state.progress["scaler"]:  # empty after steps in another precision than fp16
            self.scaler.load_state_dict(state.progress["scaler"])
        if self.average:
            self.average.updates = state.progress["averaged"]
            for name, tensor in self.average.tensors.items():
                kind = "average" if f"average/{name}" in state.tensors else "weight"  # the latter if none was kept
                tensor.copy_(place(state.tensors[f"{kind}/{name}"], tensor))
