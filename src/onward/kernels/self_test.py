"""A test of the kernels on the CPU of this machine: results of a few kernels are compared with plain PyTorch.

Shapes: N rows, I inputs, O outputs. The shapes of attention are described in `cached_attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.kernels.cached_attention import attend
from onward.kernels.fused import RMSNorm
from onward.kernels.llvm import products as kernels
from onward.kernels.memory import DTYPES, address, multiply
from onward.kernels.quantized import GROUP, dequantize_weight, weight_addresses

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # largest error relative to the greatest number of a result
QUANTIZED = {torch.float32: "int4", torch.bfloat16: "int8"}  # the quantized format that is tested with each dtype
ROWS, INPUTS, OUTPUTS = 5, 288, 259  # enough for several threads, full tiles and a remainder of each
Random = Callable[..., Tensor]  # maps a shape to random numbers
Result = tuple[str, Tensor, Tensor]  # the name of a kernel, its result, and the result of plain PyTorch


def wrong_kernel() -> str:
    """Run each kernel of the test; return the name of the first one whose result differs from that of plain PyTorch,
    "" if none does."""
    generator = torch.Generator("cpu").manual_seed(0)  # the program's random state is unchanged
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
    yield from products(QUANTIZED[dtype], x, weight_addresses(codes, scales, INPUTS), exact)
    q, keys, values = random(2, 3, 4, 24).to(dtype), random(2, 20, 2, 24).to(dtype), random(2, 20, 2, 40).to(dtype)
    positions = torch.tensor([[16, 17, 18], [9, 10, 11]], device="cpu")
    inputs = q, keys, values, positions
    result, expected = (f(*inputs, window=15, scale=0.2, softcap=None, sinks=None) for f in (attend, plain_attend))
    yield "attention", result, expected
    scale = random(INPUTS)
    yield "norms", RMSNorm.apply(x, scale, 1e-5, 0.0, dtype), F.rms_norm(x.float(), scale.shape, scale, 1e-5)


def products(weight_format: str, x: Tensor, weight: tuple[int, int], exact: Tensor) -> Iterator[Result]:
    """Yield products of one row and of all rows of x (N, I) with a weight, given by the addresses of its numbers and
    of its scales; `exact` is the weight (O, I)."""
    kernel = kernels.products(weight_format, DTYPES[x.dtype], False)
    for rows in x[:1], x:
        yield (
            f"products with {weight_format}",
            multiply(kernel, rows, *weight, None, OUTPUTS),
            rows.double() @ exact.double().T,
        )


def plain_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor | None = None,
    tails: Tensor | None = None,
    scales: Sequence[Tensor] = (),
    *,
    window: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """The result of `attend`, computed by plain PyTorch."""
    entries = [entry for entry in (keys, values, tails) if entry is not None]
    if scales:
        entries = [codes.float() * scale.float() for codes, scale in zip(entries, scales, strict=True)]
    keys, values = torch.cat([entries[0], *entries[2:]], -1), entries[1]
    if table is None:
        key_positions = positions[:, -1:] - (positions[:, -1:] - torch.arange(keys.size(1))) % keys.size(1)
    else:
        keys, values = (entry[table].flatten(1, 2) for entry in (keys, values))
        key_positions = torch.arange(keys.size(1))[None]
    distance = positions[:, :, None] - key_positions[:, None]  # (B, T, S)
    furthest = positions[:, :, None] % window if chunked else (window or math.inf) - 1
    seen = (distance >= 0) & (key_positions >= 0)[:, None] & (distance <= furthest)
    keys, values = (entry.repeat_interleave(q.size(2) // entry.size(2), 2).float() for entry in (keys, values))
    scores = torch.einsum("bthe,bshe->bhts", q.float(), keys) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes.float()[:, None, None] * distance[:, None]
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : keys.size(1)]
    return torch.einsum("bhts,bshf->bthf", weights, values).to(q.dtype)
