"""The state of a trainer as named tensors and numbers, to save and restore it."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onward.base.errors import UserError
from onward.model.decoder import Decoder

LOSS, BUFFER = "loss/", "buffer/"
OPTIMIZER = "optimizer/", "number/"


@dataclass(frozen=True)
class TrainerState:
    """The state from which a trainer continues with the same results, bit for bit.

    `tensors` are named after the trainable parameters:
      weight/PARAMETER         the parameter
      buffer/NAME              an untrained tensor of an adapter
      average/PARAMETER        the moving average of the parameter, if the trainer keeps one
      optimizer/KEY/PARAMETER  a tensor that the optimizer keeps for the parameter
      loss/NAME                a tensor that the loss keeps between steps
      loss/I/NAME              a tensor that the loss keeps in the I-th process with batches of its own
      number/KEY/PARAMETER     a number that the optimizer keeps for the parameter; for a group of parameters,
                               number/KEY/OPTIMIZER.GROUP

    Except those of losses, the names do not depend on how many processes train: a divided parameter (DTensor) has one
    entry. Frozen parameters have a weight/ entry if they are routing biases that a Balance changes, or in a SavedState.
    """

    tensors: Mapping[str, Tensor]
    progress: dict[str, Any]  # JSON: "step", "frozen" (names of frozen parameters) and other values


def training_tensors(
    model: Decoder, optimizers: Sequence[Optimizer], average: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Tensors of a TrainerState, not copied. `average` are the moving averages of the weights."""
    weights = {f"weight/{name}": p for name, p in model.named_parameters() if p.requires_grad}
    buffers = {f"{BUFFER}{name}": buffer for name, buffer in model.named_buffers() if "_lora." in name}
    averages = {f"average/{name}": tensor for name, tensor in (average or {}).items()}
    return weights | buffers | averages | optimizer_tensors(model, optimizers)


def copied_to(full: Tensor, like: Tensor) -> Tensor:
    return full.to(like.device, copy=True)


def restore(
    tensors: Mapping[str, Tensor],
    model: Decoder,
    optimizers: Sequence[Optimizer],
    place: Callable[[Tensor, Tensor], Tensor] = copied_to,
) -> None:
    """Copy the tensors of a TrainerState into a model, compiled or not, and optimizers constructed like the saved ones;
    drop the gradients. `place` copies a full tensor to the device of a parameter and divides it like the parameter."""
    model.zero_grad()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or f"weight/{name}" in tensors:
                parameter.copy_(place(tensors[f"weight/{name}"], parameter))
    for name in tensors:
        if name.startswith(BUFFER):
            owner, _, leaf = name.removeprefix(BUFFER).rpartition(".")
            setattr(model.get_submodule(owner), leaf, tensors[name].to(model.device))
    saved: dict[str, dict[str, Any]] = defaultdict(dict)
    for name in tensors:
        kind, _, rest = name.partition("/")
        if name.startswith(OPTIMIZER):
            (key, owner), value = rest.rsplit("/", 1), tensors[name]
            saved[owner][key] = value.item() if kind == "number" else value
    names = {parameter: name for name, parameter in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        optimizer.state.clear()
        for j, group in enumerate(optimizer.param_groups):
            group.update(saved[f"{i}.{j}"])
            # otherwise, torch expects the step count on the CPU
            on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                for key, value in saved[names[parameter]].items():
                    if isinstance(value, Tensor):
                        moves = on_device or value.ndim
                        value = place(value, parameter) if moves else value.clone()
                    optimizer.state[parameter][key] = value


def optimizer_tensors(model: Decoder, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for i, optimizer in enumerate(optimizers):
        kept = {names[parameter]: values for parameter, values in optimizer.state.items()}
        for j, group in enumerate(optimizer.param_groups):
            kept[f"{i}.{j}"] = {key: value for key, value in group.items() if type(value) in (int, float)}
        for owner, values in kept.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{key}/{owner}"] = value
                elif isinstance(value, int | float):
                    dtype = torch.float64 if isinstance(value, float) else torch.int64
                    tensors[f"number/{key}/{owner}"] = torch.tensor(value, dtype=dtype)
                else:
                    raise UserError(
                        f"Cannot save the state of {type(optimizer).__name__}, because it keeps a "
                        f"{type(value).__name__} as {key}, and not a tensor or a number: choose another optimizer"
                    )
    return tensors


def own_state(tensors: Mapping[str, Tensor], rank: int, count: int) -> dict[str, Tensor]:
    """Return the tensors of one process from the state of a loss that keeps a state in each process
    (`Loss.of_batches`); `rank` and `count` refer to the processes with batches of their own. Returns no tensors if the
    state was saved by another number of processes, since it then fits none of the processes."""
    owners = {name.partition("/")[0] for name in tensors}
    own = f"{rank}/" if len(owners) == count else None
    return {name.removeprefix(own): tensor for name, tensor in tensors.items() if own and name.startswith(own)}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
