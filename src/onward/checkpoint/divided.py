"""Stored models that the processes of a mesh divide: each process reads its parts of the weights."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from onward.checkpoint.lazy import load_outline
from onward.checkpoint.load import open_source
from onward.checkpoint.peft.bases import is_adapter
from onward.checkpoint.source import ModelSource
from onward.config.mesh import Mesh
from onward.errors import UserError
from onward.model.decoder import Decoder
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
    model, weights, hf = load_outline(path, dtype)
    read = partial(read_parts, weights=weights, path=path, allow_nonfinite=allow_nonfinite)
    parallelize(model, Mesh(tensor=mesh.tensor), devices, fill=read)
    return model, hf, open_source(path)


@torch.no_grad()
def read_parts(
    model: Decoder,
    weights: Mapping[str, Tensor],
    path: object,
    allow_nonfinite: bool = False,
    new: Collection[str] = (),
) -> None:
    """Set the parameters of a model to this process's parts of the stored `weights`, one parameter at a time; those
    with the names `new` are set to 0. Raises a UserError if the weights in `path` are not finite, unless
    `allow_nonfinite`."""
    for name, parameter in model.named_parameters():
        part = local(parameter)
        part.zero_() if name in new else part.copy_(part_of(weights[name], parameter))
        if not allow_nonfinite and not part.isfinite().all():
            raise UserError(f"tensor {name} in {path} has NaN or infinite elements: get the weights again")
