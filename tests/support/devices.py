"""The device of the models and tensors of a test: `conftest.py` runs every test of FOLDERS once on each device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FOLDERS = {"model", "generation", "training"}
_device = torch.device("cpu")


def device() -> torch.device:
    """Where the running test makes models and tensors."""
    return _device


@contextmanager
def using(name: str) -> Iterator[torch.device]:
    global _device
    before, _device = _device, torch.device(name)
    try:
        yield _device
    finally:
        _device = before


def available() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
