"""Measures the limits of this machine: how fast memory is read, and how fast matrices are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from onward.base.limits import memory_size
from onward.kernels.operations import linear
from onward.planning.memory import DTYPES

READ = 1 << 28  # bytes of an array that is larger than the caches of most processors
READ_BY_GPU = 1 << 31  # the same on a GPU: so large that the time to start a kernel is negligible
SIDES = [1 << i for i in range(8, 14)]  # sizes of the square matrices that are multiplied
LONG = 0.1  # maximum expected seconds of a product
ROUNDS, ENOUGH = 8, 0.2  # maximum number of timed calls, and seconds after which no further call begins


def best_seconds(run: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Seconds of the fastest of up to `rounds` calls, after a warm-up; slow calls are repeated fewer times."""
    best, began = float("inf"), perf_counter()
    for turn in range(rounds + 1):
        wait(device)
        start = perf_counter()
        if turn > 1 and start - began > ENOUGH:
            break
        run()
        wait(device)
        best = min(best, perf_counter() - start) if turn else best
    return best


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.inference_mode()
def read_bandwidth(device: torch.device | None = None, size: int = 0) -> float:
    """Measure the bytes per second that all CPU threads, or `device`, read; `size` 0: larger than most caches."""
    device = device or torch.device("cpu")
    size = size or (READ if device.type == "cpu" else READ_BY_GPU)
    array = torch.ones(size // 4096, 1024, device=device)
    x = torch.ones(1, 1024, device=device)
    ways = (lambda: array.amax(1)), (lambda: linear(x, array))
    return array.nbytes / min(best_seconds(way, device) for way in ways)


@torch.inference_mode()
def peak_flops(dtype: torch.dtype, device: torch.device | None = None, *, kernels: bool = False) -> float:
    """Measure the floating-point operations per second of a square matrix product in `dtype`: the best of several
    calls, at sizes up to the largest whose product is expected to take at most 0.1 seconds. With `kernels`, Onward's
    own kernels are also measured; generation uses them, training does not."""
    device, best = device or torch.device("cpu"), 0.0
    for side in SIDES:
        a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
        ways = (torch.matmul, linear) if kernels else (torch.matmul,)
        seconds = min(best_seconds(partial(way, a, b), device) for way in ways)
        best = max(best, 2 * side**3 / seconds)
        if 8 * seconds > LONG:
            break
    return best


NAMES = DTYPES | {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Machine:
    """The limits of a machine, and the shares of them that training, prefill and decoding are expected to reach."""

    name: str
    source: str  # where the figures come from
    memory: float  # bytes
    bandwidth: float  # bytes per second
    flops: Mapping[str, float]  # operations per second, by name of the dtype or precision
    is_cpu: bool = False
    training_share: float = 0.4
    prefill_share: float = 0.6
    decode_share: float = 0.8
    link: float = 0.0  # bytes per second that a device sends to other devices of its machine; 0: unknown
    network: float = 0.0  # bytes per second that a device sends to other machines; 0: unknown
    step_seconds: float = 0.0  # measured time of one decoding step of the model with few keys; 0: not measured

    def peak(self, dtype: str) -> float:
        return self.flops[dtype]


def same_flops(bf16: float, fp32: float) -> dict[str, float]:
    """Operations per second by name of dtype: `bf16` for all 16-bit names, `fp32` for the others."""
    return {name: fp32 if dtype == torch.float32 else bf16 for name, dtype in NAMES.items()}


def measured_machine(dtypes: Iterable[str], device: torch.device | None = None) -> Machine:
    """Measure this machine, or a GPU, for about a second, in `dtypes` (names of dtypes or precisions)."""
    device, name, memory = device or torch.device("cpu"), "this machine", memory_size()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    peaks = {dtype: peak_flops(dtype, device) for dtype in {NAMES[name] for name in dtypes}}
    flops = {name: peaks[dtype] for name, dtype in NAMES.items() if dtype in peaks}
    return Machine(name, "measured", memory, read_bandwidth(device), flops, device.type == "cpu")
