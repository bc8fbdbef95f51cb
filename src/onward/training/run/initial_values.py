"""The initial values of adapters in a new run with a divided base model. The first process computes them, and all
processes read them from a file, so that all start with the same adapters."""

from pathlib import Path

import torch
from torch import Tensor

from onward.base.files import atomic_write
from onward.checkpoint.weights import fill, read_tensors
from onward.model.decoder import Decoder

FILE = "adapters.safetensors"  # file in the run folder, deleted after step 0 is saved


def write_initial_values(model: Decoder, folder: Path) -> None:
    """Write the parameters of a model that are not deferred, and the buffers of its adapters, to a file in the run
    folder."""
    named = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if "_lora." in name)]
    if tensors := {name: tensor.detach() for name, tensor in named if not tensor.is_meta}:
        with atomic_write(folder / FILE) as temporary:
            fill(temporary, tensors, tensors.items())


@torch.no_grad()
def read_initial_values(model: Decoder, folder: Path) -> None:
    """Load the file in the run folder, if it exists, into a model that is not divided yet."""
    for path, tensor in read_tensors(folder / FILE).items() if (folder / FILE).exists() else ():
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        own: Tensor | None = getattr(module, name)
        setattr(module, name, tensor.clone()) if own is None else own.copy_(tensor)
