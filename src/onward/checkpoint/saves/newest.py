"""Reads the newest undamaged save of a run, to resume from it."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.base import fields
from onward.base.errors import UserError
from onward.base.files import read_json
from onward.checkpoint.lazy import LazyTensors, load_outline
from onward.checkpoint.load import load_model
from onward.checkpoint.saves.folder import PROGRESS, STATE, damage, saves, show, step_of
from onward.checkpoint.saves.state import TrainerState
from onward.checkpoint.weights import read_tensors
from onward.model.decoder import Decoder
from onward.model.deferred import read_of


@dataclass(frozen=True)
class SavedState(TrainerState):
    """A trainer state and the model, read from a save."""

    folder: Path
    model: Decoder  # the model with the trained weights, not their average
    messages: list[str]  # one sentence for each damaged save


def newest_state(
    run: Path,
    device: torch.device,
    spoiled: int | None = None,
    base: Callable[[], Decoder] | None = None,
    *,
    lazy: bool = False,
) -> SavedState:
    """Read the newest undamaged save of a run, and put its model into the run folder.

    Newer damaged saves are renamed, each with a message; so is the save of the step `spoiled`, after which training
    failed, if there is an earlier one. If saves hold adapters only, `base` makes the model to which they are added.
    With `lazy`, the state reads each tensor when it is looked up, and the model, also that of `base`, is on the meta
    device."""
    damages: dict[Path, str] = {}
    for folder in reversed(known := saves(run)):
        reason = "every step from it failed" if step_of(folder) == spoiled and folder != known[0] else damage(folder)
        if not reason:
            break
        damages[folder] = reason
    else:
        why = "".join(f" ({folder.name}: {reason})" for folder, reason in damages.items())
        raise UserError(f"{run} has no save to resume from{why}: start another run with --out")
    messages = [
        f"{bad} is damaged ({reason}): it is kept as damaged-{bad.name}, and the run resumes from {folder.name}"
        for bad, reason in damages.items()
    ]
    for bad in damages:
        aside = bad.with_name(f"damaged-{bad.name}")
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # another process may already have moved it
            os.replace(bad, aside)
    with suppress(UserError):  # the disk may be full
        show(folder, run)  # in case the process was killed before it did this, or these files are damaged
    tensors, progress = read_tensors(folder / STATE), read_json(folder / PROGRESS)
    frozen = fields.convert(tuple[str, ...], progress.get("frozen", ()), f"{folder / PROGRESS}.frozen")
    # the model's file may hold averages, which may have another dtype than the weights
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name.startswith("weight/")}
    if lazy:
        outline = base() if base else load_outline(folder)[0]
        return lazy_state(outline, folder, tensors, frozen, next(iter(dtypes), None), progress, messages)
    model = base().to(device) if base else load_model(folder, device=device)[0]
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(next(iter(dtypes), parameter.dtype))
            tensors[f"weight/{name}"] = parameter.data  # a step may have changed it: a routing bias
        elif (weight := tensors.get(f"weight/{name}")) is not None:
            tensors[f"average/{name}"] = parameter.data
            parameter.data = weight.to(device, copy=True)
        else:
            tensors[f"weight/{name}"] = parameter.data
    return SavedState(tensors, progress, folder, model, messages)


def lazy_state(
    model: Decoder,
    folder: Path,
    tensors: Mapping[str, Tensor],
    frozen: Sequence[str],
    dtype: torch.dtype | None,
    progress: dict[str, Any],
    messages: list[str],
) -> SavedState:
    """The state of a save whose tensors are read when they are looked up; `dtype` is the dtype of the weights in the
    state's file, None if it has none."""
    reads: dict[str, Callable[[], Tensor]] = {name: partial(tensors.__getitem__, name) for name in tensors}
    for name, parameter in model.named_parameters():
        if read := read_of(parameter):
            reads[f"average/{name}" if f"weight/{name}" in tensors else f"weight/{name}"] = read
        if name in frozen:
            parameter.requires_grad_(False)
        if dtype and (name in frozen or f"weight/{name}" in tensors):
            parameter.data = parameter.data.to(dtype)
    return SavedState(LazyTensors(reads), progress, folder, model, messages)
