"""Weights of the bitsandbytes library: NF4 and FP4 (QLoRA, arXiv:2305.14314, section 3) and int8 (arXiv:2208.07339).

Shapes: O outputs, I inputs, n elements of a weight, in the order of its rows.
"""

import json
import math

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.huggingface.formats.parts import Config, Parts, refusal, whole
from onward.checkpoint.weights import FLOATS, StoredTensor

STATES = ".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4"
NESTED = ".weight.nested_absmax", ".weight.nested_quant_map"


def four_bits(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A weight stored as bytes (n / 2, 1) of two codes, the high half first; the number of each code, `quant_map`
    (16,); the largest magnitude of each block of elements, `absmax`; and a JSON object with its shape and the sizes of
    blocks. With double quantization, `absmax` contains one-byte codes of its numbers minus their mean."""
    weight, absmax, numbers = parts[".weight"], parts[".weight.absmax"], parts[".weight.quant_map"]
    states = [parts[ending] for ending in STATES if ending in parts]
    try:
        (state,) = [json.loads(bytes(whole(tensor).tolist())) for tensor in states]
        outputs, inputs = (int(size) for size in state["shape"])
        size, dtype = int(state["blocksize"]), {"float16": "F16"}.get(state["dtype"], "BF16")
        nested_size, mean = int(state.get("nested_blocksize") or 1), float(state.get("nested_offset") or 0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{name} has no quant_state of bitsandbytes with its shape: get the files again") from None
    nested = [parts[ending] for ending in NESTED if ending in parts]
    elements, stored = outputs * inputs, math.prod(weight.shape) * whole(weight).itemsize
    counts = [math.prod(tensor.shape) for tensor in (absmax, numbers, *nested)]
    blocks = math.ceil(elements / size) if size > 0 < nested_size else 0
    wanted = [blocks, 16] + ([math.ceil(blocks / nested_size), 256] if absmax.dtype == "U8" else [])
    scales = nested if nested else [absmax]
    if stored != math.ceil(elements / 2) or counts != wanted or any(t.dtype not in FLOATS for t in [numbers, *scales]):
        raise refusal(name, weight, absmax, f"a weight of {outputs} by {inputs} in four bits, in blocks of {size}")

    def largest(first: int, last: int) -> Tensor:
        """The largest magnitudes of blocks [first, last)."""
        part = whole(absmax)[first:last]
        if not nested:
            return part.float()
        maxima, codes = whole(nested[0]).float(), whole(nested[1]).float()
        return codes[part.int()] * maxima[torch.arange(first, last) // nested_size] + mean

    def read(start: int, end: int) -> Tensor:
        first, last = start * inputs // size * size, end * inputs  # from the start of a block
        halves = whole(weight).contiguous().view(-1).view(torch.uint8)[first // 2 : math.ceil(last / 2)]
        codes = torch.stack([halves >> 4, halves & 15], 1).flatten()[first % 2 :][: last - first]
        factors = largest(first // size, math.ceil(last / size)).repeat_interleave(size)[: last - first]
        values = whole(numbers).float()[codes.int()] * factors
        return values[start * inputs - first :].view(end - start, inputs)

    return StoredTensor([outputs, inputs], dtype, read)


def int8(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A weight (O, I) in int8 and the largest magnitude of each row, `SCB` (O,), which the integer 127 represents.
    Onward computes with these integers; outlier columns are not treated separately."""
    weight, maxima = parts[".weight"], parts[".SCB"]
    plain = ".weight_format" not in parts or not whole(parts[".weight_format"]).any()
    if weight.dtype != "I8" or maxima.dtype not in FLOATS or maxima.shape != weight.shape[:1] or not plain:
        raise refusal(name, weight, maxima, "int8 by rows")

    def ours(start: int, end: int) -> tuple[Tensor, Tensor]:
        return weight.rows(start, end), whole(maxima)[start:end].float() / 127

    def read(start: int, end: int) -> Tensor:
        integers, scales = ours(start, end)
        return integers.float() * scales[:, None]

    return StoredTensor(weight.shape, "BF16", read, quantized=ours)
