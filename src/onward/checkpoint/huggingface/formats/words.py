"""GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978): integers with zero points, packed into int32 words.

Shapes: O outputs, I inputs, G groups of inputs with the same scale. A weight is stored transposed, as (I, O).
"""

import math

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.huggingface.formats.parts import Config, Parts, fields, half, is_float, refusal, whole
from onward.checkpoint.weights import StoredTensor

AWQ_COLUMNS = [0, 4, 1, 5, 2, 6, 3, 7]  # where a word holds each of its 8 columns: it stores 0, 2, 4, 6, 1, 3, 5, 7


def gptq(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A weight stored as words `qweight` (words, O), packed along the inputs; zero points `qzeros` (G, words), packed
    along the outputs; `scales` (G, O); and, with desc_act, the group of each input, `g_idx` (I,)."""
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise UserError(f"config.json has checkpoint_format {layout!r}: Onward reads GPTQ as 'gptq' and 'gptq_v2'")
    if config.get("rotation"):
        raise UserError(f"config.json has rotation {config['rotation']!r}, which Onward does not read in GPTQ")
    weight, zeros, scales = parts[".qweight"], parts[".qzeros"], parts[".scales"]
    words, outputs = weight.shape if len(weight.shape) == 2 else (0, 0)
    groups = scales.shape[0] if scales.shape else 0
    bits = 32 * zeros.shape[-1] // max(outputs, 1)
    if not config.get("dynamic") and config.get("bits") not in (None, bits):
        raise refusal(name, weight, scales, f"GPTQ of the {config['bits']} bits in config.json")
    if (
        bits not in (2, 4, 8)
        or (weight.dtype, zeros.dtype) != ("I32", "I32")
        or not is_float(scales)
        or [zeros.shape, scales.shape] != [[groups, outputs * bits // 32], [groups, outputs]]
        or outputs * bits % 32
    ):
        raise refusal(name, weight, scales, "GPTQ of 2, 4 or 8 bits")
    inputs = words * 32 // bits
    ones = sum(1 << shift for shift in range(0, 32, bits)) if layout == "gptq" else 0
    group = group_of_inputs(name, parts, config, inputs, groups)

    def read(start: int, end: int) -> Tensor:
        integers = fields(whole(weight)[:, start:end], bits, 0)
        first = start * bits // 32
        columns = whole(zeros)[:, first : math.ceil(end * bits / 32)] + ones  # version 1 stores each point minus 1
        points = fields(columns, bits, 1)[:, start - first * 32 // bits :][:, : end - start]
        return ((integers - points[group]) * whole(scales)[:, start:end].float()[group]).mT

    return StoredTensor([outputs, inputs], half(scales), read)


def group_of_inputs(name: str, parts: Parts, config: Config, inputs: int, groups: int) -> Tensor:
    """The group of each input, (I,): as stored or, if none is stored, in groups of consecutive inputs."""
    if stored := parts.get(".g_idx"):
        group = whole(stored).long()
        if group.shape == (inputs,) and group.min() >= 0 and group.max() < groups:
            return group
        raise refusal(
            f"{name} with g_idx", stored, parts[".scales"], f"a group for each of {inputs} inputs in {groups} groups"
        )
    size = config.get("group_size", -1)
    size = size if isinstance(size, int) and size > 0 else inputs
    if config.get("dynamic") and inputs % groups == 0:  # layers may have different group sizes
        size = inputs // groups
    if math.ceil(inputs / size) != groups:
        raise refusal(name, parts[".qweight"], parts[".scales"], f"of {inputs} inputs in groups of {size}")
    return torch.arange(inputs) // size


def awq(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A weight stored as words `qweight` (I, O / 8) and zero points `qzeros` (G, O / 8), eight integers of four bits
    each, and `scales` (G, O)."""
    layout = str(config.get("version") or config.get("format") or config.get("checkpoint_format") or "gemm").lower()
    if layout != "gemm" or config.get("zero_point") is False or config.get("bits", config.get("w_bit", 4)) != 4:
        raise UserError(
            f"Cannot read AWQ weights with version {layout!r}, {config.get('bits', config.get('w_bit', 4))} bits and "
            f"zero_point {config.get('zero_point', True)}: choose weights with version 'gemm', 4 bits and zero points"
        )
    weight, zeros, scales = parts[".qweight"], parts[".qzeros"], parts[".scales"]
    inputs, words = weight.shape if len(weight.shape) == 2 else (0, 0)
    groups = scales.shape[0] if scales.shape else 0
    if (
        (weight.dtype, zeros.dtype) != ("I32", "I32")
        or not is_float(scales)
        or [zeros.shape, scales.shape] != [[groups, words], [groups, 8 * words]]
        or not groups
        or inputs % groups
    ):
        raise refusal(name, weight, scales, "AWQ of 4 bits")

    def integers(tensor: StoredTensor, start: int, end: int) -> Tensor:
        columns = fields(whole(tensor)[:, start // 8 : math.ceil(end / 8)], 4, 1).unflatten(1, (-1, 8))
        return columns[:, :, AWQ_COLUMNS].flatten(1)[:, start % 8 :][:, : end - start]

    def read(start: int, end: int) -> Tensor:
        codes = integers(weight, start, end).unflatten(0, (groups, -1))
        differences = codes - integers(zeros, start, end)[:, None]
        return (differences * whole(scales)[:, None, start:end].float()).flatten(0, 1).mT

    return StoredTensor([8 * words, inputs], half(scales), read)
