"""A test of the kernels on the CPU of this machine: results of a few kernels are compared with plain PyTorch.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from onward.kernels.attention import attend, plain_attend
from onward.kernels.linear import run
from onward.kernels.memory import address
from onward.kernels.norm import RMSNorm, plain_rms_norm
from onward.kernels.quantized import GROUP, addresses, dequantize_weight
from onward.kernels.rules import DTYPES, emitter

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # of an error, relative to the greatest number of a result
QUANTIZED = {torch.float32: "int4", torch.bfloat16: "int8"}  # the format that is tested with each dtype
ROWS, INPUTS, OUTPUTS = 5, 288, 259  # enough for several threads, for whole tiles and for a rest of each
Random = Callable[..., Tensor]  # from a shape to random numbers
Result = tuple[str, Tensor, Tensor]  # the name of a kernel, its result, and that of plain PyTorch


def wrong_kernel() -> str:
    """Run each kernel of the test; return the name of the first one whose result differs from that of plain PyTorch,
    "" if none does."""
    generator = torch.Generator("cpu").manual_seed(0)  # the random state of the program stays as it is
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        for dtype, tolerance in TOLERANCES.items():
            random = partial(torch.randn, generator=generator, device="cpu", dtype=torch.float32)
            for name, result, expected in results(dtype, random):
                bound = tolerance * expected.double().abs().max()
                if not ((result.double() - expected.double()).abs() <= bound).all():  # NaN is wrong, too
                    return f"{name} in {DTYPES[dtype]}"
    return ""


def results(dtype: torch.dtype, random: Random) -> Iterator[Result]:
    """Yield the results of kernels for activations in `dtype`."""
    x, weight = random(ROWS, INPUTS).to(dtype), random(OUTPUTS, INPUTS).to(dtype)
    pointer = address(weight, dtype, OUTPUTS, INPUTS)
    yield from products(DTYPES[dtype], x, (pointer, pointer), weight)
    if QUANTIZED[dtype] == "int8":
        codes, scales = (50 * random(OUTPUTS, INPUTS)).clamp(-127, 127).to(torch.int8), random(OUTPUTS)
    else:
        codes = (50 * random(OUTPUTS, INPUTS // 2)).to(torch.int8).view(torch.uint8)
        scales = random(OUTPUTS, INPUTS // GROUP).bfloat16()
    exact = dequantize_weight(codes, scales, torch.float64)
    yield from products(QUANTIZED[dtype], x, addresses(codes, scales, INPUTS), exact)
    q, keys, values = random(2, 3, 4, 24).to(dtype), random(2, 20, 2, 24).to(dtype), random(2, 20, 2, 40).to(dtype)
    positions = torch.tensor([[16, 17, 18], [9, 10, 11]], device="cpu")
    inputs = q, keys, values, positions
    result, expected = (f(*inputs, window=15, scale=0.2, softcap=None, sinks=None) for f in (attend, plain_attend))
    yield "attention", result, expected
    scale = random(INPUTS)
    yield "norms", RMSNorm.apply(x, scale, 1e-5, 0.0, dtype), plain_rms_norm(x, scale, 1e-5, 0.0, dtype)


def products(weight_format: str, x: Tensor, weight: tuple[int, int], exact: Tensor) -> Iterator[Result]:
    """Yield products of one row and of all rows of x (N, I) with a weight, given by the addresses of its numbers and
    of its scales; `exact` is the weight (O, I)."""
    kernel = emitter("products").products(weight_format, DTYPES[x.dtype], False)
    for rows in x[:1], x:
        yield (
            f"products with {weight_format}",
            run(kernel, rows, *weight, None, OUTPUTS),
            rows.double() @ exact.double().T,
        )
