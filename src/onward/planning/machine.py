"""The limits of this machine, measured: how fast memory is read, and how fast matrices are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch

from onward.limits import memory_size
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


BF16, FP32 = ("bfloat16", "float16", "bf16", "fp16"), ("float32", "fp32")


@dataclass(frozen=True)
class Machine:
    """A machine, and the shares of its limits that models reach."""

    name: str
    source: str  # where the figures are from
    memory: float  # bytes
    bandwidth: float  # bytes per second
    flops: Mapping[str, float]  # operations per second, by the name of a dtype or precision
    is_cpu: bool = False
    training_share: float = 0.4
    prefill_share: float = 0.6
    decode_share: float = 0.8
    step_overhead: float = 0.0  # seconds per layer of a decoding step beside its arithmetic and memory

    def peak(self, dtype: str) -> float:
        return self.flops[dtype]


def same_flops(bf16: float, fp32: float) -> dict[str, float]:
    """The operations per second of each dtype and precision."""
    return dict.fromkeys(BF16, bf16) | dict.fromkeys(FP32, fp32)


def measured_machine(device: torch.device | None = None) -> Machine:
    """This machine, or one of its devices, by products and reductions of a second."""
    device = device or torch.device("cpu")
    cpu = device.type == "cpu"
    memory = memory_size() if cpu else torch.cuda.get_device_properties(device).total_memory
    fp32, bf16, fp16 = (peak_flops(dtype, device) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    flops = same_flops(bf16, fp32) | {"float16": fp16, "fp16": fp16}
    return Machine("this machine", "measured", memory, read_bandwidth(device), flops, cpu)
