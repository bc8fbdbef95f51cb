"""The default mesh of processes: the first candidate in which each process safely fits into the memory of its
device."""

import os
from collections.abc import Callable, Sequence

import torch

from onward.base.device import choose_device
from onward.base.limits import in_bytes, memory_size
from onward.config.decoder import DecoderConfig
from onward.config.mesh import Mesh, divides_vocabulary
from onward.planning.arrangements import SAFE
from onward.planning.memory import HOLES, GenerationMemory, TrainingMemory

KINDS = "weights", "gradients", "optimizer", "activations", "gathered", "engine", "cache"  # the uses of memory


def device_bytes(device: str) -> int:
    """Return the bytes of memory of this process's GPU or, for other devices, its share of the machine's memory;
    `device` is the name of a device or "auto"."""
    if choose_device(device).type == "cuda":
        return torch.cuda.mem_get_info()[1]
    return memory_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def holes_on(device: str) -> float:
    """Return the fraction of memory lost to fragmentation on a device, the argument `holes` of the functions that plan
    memory."""
    return HOLES if choose_device(device).type == "cpu" else 0.0


def first_that_fits(meshes: Sequence[Mesh], peak: Callable[[Mesh], int], device: str) -> Mesh:
    """Return the first of `meshes` in which the memory of a process, `peak(mesh)` bytes, safely fits on a device; the
    last mesh if none fits."""
    most = SAFE * device_bytes(device)
    return next((mesh for mesh in meshes[:-1] if peak(mesh) <= most), meshes[-1])


def in_words(mesh: Mesh, memory: TrainingMemory | GenerationMemory, decoder: DecoderConfig, device: str) -> str:
    """Describe a mesh in a sentence: the memory that each process needs, by use, the memory of its device, and whether
    the tensor axis divides the embedding and the head of the decoder."""
    uses = ", ".join(f"{name} {in_bytes(size)}" for name in KINDS if (size := getattr(memory, name, 0)))
    undivided = (
        ""
        if divides_vocabulary(decoder, mesh.tensor)
        else f"; embedding and head are not divided, since {mesh.tensor} does not divide vocab_size "
        f"{decoder.vocab_size:,}"
    )
    available = in_bytes(device_bytes(device))
    return f"mesh {mesh}: each process needs about {in_bytes(memory.peak)} of {available} ({uses}){undivided}"
