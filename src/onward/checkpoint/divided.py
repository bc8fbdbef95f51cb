"""Stored models that the processes of a mesh divide: each process reads its parts of the weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DeviceMesh

from onward.checkpoint.lazy import load_outline
from onward.checkpoint.load import open_source
from onward.checkpoint.peft.bases import is_adapter
from onward.checkpoint.source import ModelSource
from onward.config.mesh import Mesh
from onward.errors import UserError
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
    allow_nonfinite: bool = False,
) -> tuple[Decoder, dict[str, Any], ModelSource]:
    """Load this process's part of the decoder in a folder or a GGUF file, which the processes of the tensor axis of a
    mesh divide; return it with its config.json and its source, as `load_with_adapters` does. No process holds the whole
    model, and replicas do not communicate. `dtype` and `allow_nonfinite` are those of `load_model`.

    Raises a UserError for an adapter, for quantized weights, and for a size or a part that the axis cannot divide.
    """
    if is_adapter(path):
        raise UserError(
            f"{path} is an adapter, which is not for a divided model, and mesh is {str(mesh)!r}: make a model of it "
            "with onward merge, or use replicas only"
        )
    model, hf = load_outline(path, dtype)
    fill = parts_reader(model, path, allow_nonfinite=allow_nonfinite)
    parallelize(model, Mesh(tensor=mesh.tensor), devices, fill=fill)
    return model, hf, open_source(path)


def parts_reader(model: Decoder, path: object, *, allow_nonfinite: bool = False) -> Callable[[Decoder], None]:
    """Return a function that sets the parameters of a model on the meta device, after the processes have divided it, to
    this process's parts of their deferred values, one parameter at a time; parameters without such values are set to 0.

    The function raises a UserError if values are not finite, unless `allow_nonfinite`; `path`, from where they are
    read, is named in the message.
    """
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
