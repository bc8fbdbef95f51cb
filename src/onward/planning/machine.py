"""The limits of this machine, measured: how fast memory is read, and how fast matrices are multiplied."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from onward.model.linear import linear

READ = 1 << 28  # bytes of an array that no processor's cache holds
SIDE = 1024  # rows and columns of the matrices that are multiplied
ROUNDS = 8


def best_seconds(run: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """The shortest of several calls, after one to warm up."""
    best = float("inf")
    for turn in range(rounds + 1):
        wait(device)
        start = perf_counter()
        run()
        wait(device)
        best = min(best, perf_counter() - start) if turn else best
    return best


def wait(device: torch.device) -> None:
    """Wait until a device has done all work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.inference_mode()
def read_bandwidth(device: torch.device | None = None, size: int = READ) -> float:
    """Bytes per second at which all threads, or a device, read an array of `size` bytes: the best of several passes of
    a reduction and of a product with a vector. Other work on the machine changes it at any time."""
    device = device or torch.device("cpu")
    array = torch.ones(size // 4096, 1024, device=device)
    x = torch.ones(1, 1024, device=device)
    ways = (lambda: array.amax(1)), (lambda: linear(x, array))
    return array.nbytes / min(best_seconds(way, device) for way in ways)


@torch.inference_mode()
def peak_flops(dtype: torch.dtype, device: torch.device | None = None, side: int = SIDE) -> float:
    """Floating-point operations per second of a product of two square matrices: the best of several."""
    device = device or torch.device("cpu")
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / best_seconds(lambda: a @ b, device)
