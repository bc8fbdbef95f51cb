"""The device to compute on."""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from onward.base.errors import UserError


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device with this name, such as "cuda:1"; for None and "auto", the first available of CUDA, Apple's MPS
    and the CPU. Raises a UserError if this machine lacks the device."""
    if name is None or name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = known_device(name)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        there = (
            f"this machine has only cuda:0 to cuda:{count - 1}" if count else "no GPU found that this PyTorch can use"
        )
        raise UserError(f"device is {str(name)!r}: {there}; choose auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"device is {str(name)!r}: no Apple GPU found; choose auto or cpu")
    try:
        torch.empty(0, device=device).tolist()  # the device "meta" holds no values, so this raises
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(f"device {str(name)!r} cannot be used here: choose auto, cpu, cuda or mps") from None
    return device


def known_device(name: str | torch.device) -> torch.device:
    """Return the device with this name, such as "cuda:1", whether or not this machine has it. Raises a UserError for a
    name that `torch` does not accept."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        raise UserError(f"device is {str(name)!r}: choose auto, cpu, cuda or mps") from None


def tensor_on(device: torch.device, values: ArrayLike, dtype: torch.dtype = torch.long) -> Tensor:
    """Copy `values`, numbers or nested lists of numbers, to a tensor on a device. On CUDA the copy is asynchronous,
    from pinned memory."""
    tensor = torch.from_numpy(np.asarray(values)).to(dtype)  # NumPy reads lists faster than torch.tensor does
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
