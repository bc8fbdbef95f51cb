"""Where to compute."""

import torch

from onward.errors import UserError


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """The device of that name or, for None and `auto`, the best there is: CUDA, Apple's MPS, the CPU."""
    if name is None or name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=name).tolist()  # the device meta holds nothing
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(f"device {str(name)!r} cannot be used here: choose auto, cpu, cuda or mps") from None
    return torch.device(name)
