"""Builds the trainer of a run from its configuration."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.config.decoder import at
from onward.model.adapters import adapter_names
from onward.model.decoder import Decoder
from onward.model.experts import ExpertsModule
from onward.training.config import RunConfig
from onward.training.step.average import Average
from onward.training.step.balance import Balance
from onward.training.step.health import Spikes
from onward.training.step.loss import CrossEntropy, Loss
from onward.training.step.mup import factors_of
from onward.training.step.optimizer import optimizers
from onward.training.step.schedule import learning_rate
from onward.training.step.trainer import StepConfig, Trainer
from onward.transforms.compiling import compile_blocks
from onward.transforms.lora import raised
from onward.transforms.recompute import recompute_blocks

if TYPE_CHECKING:
    from onward.parallel.processes import Processes


def build_trainer(
    config: RunConfig,
    model: Decoder,
    processes: "Processes | None" = None,
    loss: Loss | None = None,
    fill: Callable[[Decoder], object] = lambda model: None,
) -> Trainer:
    """Build a trainer for the trainable parameters of a model. `loss` defaults to the configured cross-entropy.
    The precision "auto", which runs replace by the fastest one, is fp32 here.

    Changes the model in place, as configured: sets the backend of its experts, compiles its blocks, and makes them
    recompute activations. The `processes` (None: a single process) replicate or shard its parameters; `fill` is then
    called with the model, to set the weights of a model on the meta device.
    """
    c = config
    choose_backend(model, c.experts)
    loss = loss or CrossEntropy.of(c)
    if processes:
        divide(c, model, loss, processes, fill)
    else:
        if c.compile:
            compile_blocks(model)
        if c.recompute:
            recompute_blocks(model)
    rates = {name: factor.rate for name, factor in factors_of(c, model.config).items()} if c.mup else {}
    rates |= dict.fromkeys(raised(model), c.adapters.b_rate) if c.adapters else {}
    peak = c.peak_learning_rate(model.config.d_model)
    return Trainer(
        model,
        optimizers(model, c.optimizer, peak, c.weight_decay, (c.beta1, c.beta2), rates, processes),
        learning_rate(c, peak),
        StepConfig(c.clip, "fp32" if c.precision == "auto" else c.precision),
        loss=loss,
        balance=balance(c, model, processes),
        average=Average(model, c.average) if c.average else None,
        spikes=Spikes(c.spike),
        processes=processes,
    )


def divide(
    config: RunConfig, model: Decoder, loss: Loss, processes: "Processes", fill: Callable[[Decoder], object]
) -> None:
    """Shard a model, and the models that its loss contains, over the mesh of `processes`, in place; see
    `build_trainer`. Raises a UserError for a loss that does not support a context axis."""
    from onward.checkpoint.divided import parts_reader

    processes.parallelize(
        model, precision=config.precision, compile=config.compile, recompute=config.recompute, fill=fill
    )
    if processes.mesh.context > 1 and not isinstance(loss, CrossEntropy):
        raise UserError(
            f"Cannot compute the loss {type(loss).__name__} over a context axis (mesh {str(processes.mesh)!r}): use "
            "context=1, or the cross-entropy"
        )
    if processes.divides:
        place: Any = partial(processes.parallelize, precision=config.precision)
        loss.divide(lambda held: place(held, fill=parts_reader(held, "a reference or teacher")))


def balance(config: RunConfig, model: Decoder, processes: "Processes | None") -> Balance | None:
    """Return the Balance of a model with experts; None for a model without experts."""
    names = dict(processes.whole_parameters(model) if processes else model.named_parameters())
    if not any(name.endswith(".mlp.router.weight") for name in names):
        return None
    # each process of the tensor axis computes the whole auxiliary loss
    tensor = processes.mesh.tensor if processes else 1
    bias = 0.0 if adapter_names(model) else config.balance_bias
    return Balance(model, config.balance_loss / tensor, bias, processes)


def open_experts(model: Decoder) -> list[ExpertsModule]:
    """List the experts whose backend the model's configuration leaves open."""
    mlps = ((getattr(block, "mlp", None), at(model.config.mlp, layer)) for layer, block in enumerate(model.blocks))
    return [m for m, part in mlps if isinstance(m, ExpertsModule) and getattr(part, "backend", "") == "auto"]


def choose_backend(model: Decoder, backend: Any) -> None:
    for module in open_experts(model):
        module.part = replace(module.part, backend=backend)
