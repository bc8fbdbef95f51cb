"""Stored models that the processes of a mesh divide: each process reads its parts of the weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DeviceMesh

from onward.base.errors import UserError
from onward.checkpoint.peft.adapters import load_with_adapters
from onward.checkpoint.source import ModelSource
from onward.config.mesh import Mesh
from onward.model.decoder import Decoder
from onward.model.deferred import deferred_reads
from onward.parallel.parallelize import parallelize
from onward.parallel.parts import local, part_of


def load_divided(
    path: Path,
    mesh: Mesh,
    devices: DeviceMesh | None,
    dtype: torch.dtype | None = None,
    *,
    adapter_folders: Sequence[Path] = (),
    allow_nonfinite: bool = False,
) -> tuple[Decoder, dict[str, Any], ModelSource]:
    """Load this process's part of a decoder that is divided over the tensor axis of a mesh; otherwise like
    `load_with_adapters`. No process holds the whole model, and replicas do not communicate."""
    model, hf, source = load_with_adapters(path, adapter_folders, dtype, lazy=True)
    fill = parts_reader(model, path, allow_nonfinite=allow_nonfinite)
    parallelize(model, Mesh(tensor=mesh.tensor), devices, fill=fill)
    return model, hf, source


def parts_reader(model: Decoder, path: object, *, allow_nonfinite: bool = False) -> Callable[[Decoder], None]:
    """A function that sets a model's parameters to this process's parts of their deferred values, one at a time.
    `model` is on the meta device; the function is called after the processes have divided it. Meta parameters without
    deferred values are set to 0; `path` names their source in errors."""
    reads = deferred_reads(model)
    zero = {name for name, parameter in model.named_parameters() if parameter.is_meta} - reads.keys()

    @torch.no_grad()
    def fill(model: Decoder) -> None:
        for name, parameter in model.named_parameters():
            part = local(parameter)
            if name in reads:
                part.copy_(part_of(reads[name](), parameter))
            elif name in zero:
                part.zero_()
            if not allow_nonfinite and not part.isfinite().all():
                raise UserError(f"tensor {name} in {path} has NaN or infinite elements: get the weights again")

    return fill
