"""Builds the trainer of a run from its configuration."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from onward.base.errors import UserError
from onward.checkpoint.divided import parts_reader
from onward.config.decoder import at
from onward.model.adapters import adapter_names
from onward.model.decoder import Decoder
from onward.model.experts import ExpertsModule
from onward.parallel.parallelize import parallelize
from onward.training.config import RunConfig
from onward.training.processes import Processes
from onward.training.step.average import Average
from onward.training.step.balance import Balance
from onward.training.step.health import Spikes
from onward.training.step.loss import CrossEntropy, Loss
from onward.training.step.mup import factors_of
from onward.training.step.optimizer import optimizers
from onward.training.step.schedule import lr_factor
from onward.training.step.trainer import StepConfig, Trainer
from onward.transforms.lora import raised


def build_trainer(
    config: RunConfig,
    model: Decoder,
    processes: Processes | None = None,
    loss: Loss | None = None,
    fill: Callable[[Decoder], object] = lambda model: None,
) -> Trainer:
    """Build a trainer for the trainable parameters of a model. `loss` defaults to the configured cross-entropy.

    Sets the backend of the model's experts, and parallelizes the model over the mesh of `processes`, in place: compiles
    its blocks, makes them recompute activations, and divides its parameters, as configured. `fill` is called with a
    model on the meta device after it is divided, to set its weights.
    """
    c, processes = config, processes or Processes()
    peak = c.peak_learning_rate(model.config.d_model)
    choose_backend(model, c.experts)
    groups: dict[str, Any] = {"devices": processes.devices, "context": processes.context}
    place: Any = partial(parallelize, mesh=processes.mesh, precision=c.precision, **groups)
    place(model, compile=c.compile, recompute=c.recompute, fill=fill)
    loss = loss or CrossEntropy(c.z_loss, c.label_smoothing, c.loss_chunk)
    if processes.mesh.context > 1 and not isinstance(loss, CrossEntropy):
        raise UserError(
            f"the loss {type(loss).__name__} is not for a context axis, and mesh is {str(processes.mesh)!r}: use "
            "context=1, or the cross-entropy"
        )
    if processes.mesh.divides:
        loss.divide(lambda held: place(held, fill=parts_reader(held, "a reference or teacher")))
    share = c.balance_loss / processes.mesh.tensor  # each process of the tensor axis computes the whole auxiliary loss
    rates = {name: factor.rate for name, factor in factors_of(c, model.config).items()}
    rates |= dict.fromkeys(raised(model), c.adapters.b_rate) if c.adapters else {}
    return Trainer(
        model,
        optimizers(
            model,
            c.optimizer,
            peak,
            c.weight_decay,
            (c.beta1, c.beta2),
            rates,
            (processes.rank % processes.mesh.stage, processes.mesh.stage),
            processes.stage,
        ),
        learning_rate(c, model),
        StepConfig(c.clip, c.precision),
        loss=loss,
        balance=Balance(model, share, 0.0 if adapter_names(model) else c.balance_bias, processes.context),
        average=Average(model, c.average) if c.average else None,
        spikes=Spikes(c.spike),
        processes=processes,
    )


def learning_rate(config: RunConfig, model: Decoder) -> Callable[[int], float]:
    """Return the learning rate of a run as a function of the step, counted from 0."""
    c, peak = config, config.peak_learning_rate(model.config.d_model)
    return lambda step: peak * lr_factor(c.schedule, step, c.steps, c.warmup, c.min_lr_ratio, c.decay)


def open_experts(model: Decoder) -> list[ExpertsModule]:
    """List the mixture-of-experts modules of a model for which its configuration leaves the backend open ("auto")."""
    mlps = ((getattr(block, "mlp", None), at(model.config.mlp, layer)) for layer, block in enumerate(model.blocks))
    return [m for m, part in mlps if isinstance(m, ExpertsModule) and getattr(part, "backend", "") == "auto"]


def choose_backend(model: Decoder, backend: Any) -> None:
    """Set `backend`, "loop" or "grouped", in the mixture-of-experts modules of a model for which its configuration
    leaves the backend open."""
    for module in open_experts(model):
        module.part = replace(module.part, backend=backend)
