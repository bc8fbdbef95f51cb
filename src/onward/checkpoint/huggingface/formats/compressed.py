"""The packed integers of compressed-tensors, and a check of the options in its config.

Shapes: O outputs, I inputs, G groups of inputs with the same scale.
"""

import math

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.huggingface.formats.parts import Config, Parts, fields, half, is_float, refusal, whole
from onward.checkpoint.huggingface.formats.scaled import weight_schemes
from onward.checkpoint.packed import BITS, FORMAT, unpacked
from onward.checkpoint.weights import StoredTensor
from onward.kernels.quantized import GROUP

FORMATS = (
    *(FORMAT, "float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    *("mixed-precision", "dense"),
)


def check_compressed(config: Config) -> None:
    """Refuse formats and options that Onward does not read."""
    groups = config.get("config_groups")
    tables = [config, *(groups.values() if isinstance(groups, dict) else [])]
    for layout in (table["format"] for table in tables if isinstance(table, dict) and table.get("format")):
        if layout not in FORMATS:
            raise UserError(
                f"config.json has the quantized format {layout!r}: Onward reads {', '.join(FORMATS)}, so get the "
                "weights in one of these"
            )
    sparsity = config.get("sparsity_config")
    if config.get("transform_config") or (isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense"):
        raise UserError(
            "config.json has a quantization_config with transform_config or a sparsity_config that is not dense, which "
            "Onward does not read: get weights without them"
        )


def packed_integers(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A weight (O, I), stored as int32 words `weight_packed` (O, words), `weight_scale` (O, G) and `weight_shape` (2,);
    with zero points as words `weight_zero_point` (words, G), packed along the outputs; with actorder "group", the group
    of each input, `weight_g_idx` (I,).

    Its rows can be read dequantized, and also as integers and scales if Onward computes with this precision."""
    words, scales, shape = parts[".weight_packed"], parts[".weight_scale"], parts[".weight_shape"]
    zeros, order = parts.get(".weight_zero_point"), parts.get(".weight_g_idx")
    size = shape.rows(0, 2).tolist() if (shape.dtype, shape.shape) == ("I64", [2]) else []
    outputs, inputs = size if len(size) == 2 and min(size) > 0 else (0, 0)
    widths = [bits for bits in BITS.values() if words.shape == [outputs, math.ceil(inputs * bits / 32)]]
    groups = scales.shape[1] if len(scales.shape) == 2 and scales.shape[0] == outputs else 0
    if not widths or words.dtype != "I32" or not is_float(scales) or not groups or inputs % groups:
        raise refusal(name, words, scales, f"integers of 4 or 8 bits for a weight of shape {size}")
    bits, count = widths[0], inputs // groups
    schemes = weight_schemes(config)
    if zeros is None and schemes and all(scheme.get("symmetric") is False for scheme in schemes):
        raise refusal(name, words, scales, "asymmetric (symmetric: false) without weight_zero_point")
    if zeros and (zeros.dtype, zeros.shape) != ("I32", [math.ceil(outputs * bits / 32), groups]):
        raise refusal(f"{name}_zero_point", zeros, scales, f"zero points of {bits} bits")
    group = torch.arange(inputs) // count
    if order and not (whole(order) < 0).any():  # -1 means the default order
        group = whole(order).long()
        if group.shape != (inputs,) or group.max() >= groups:
            raise refusal(f"{name}_g_idx", order, scales, f"a group for each of {inputs} inputs in {groups} groups")

    def integers(start: int, end: int) -> tuple[Tensor, Tensor]:
        return unpacked(words.rows(start, end), bits, inputs), scales.rows(start, end)

    def plain(start: int, end: int) -> Tensor:
        codes, factors = integers(start, end)
        numbers = codes.float()
        if zeros:
            first = start * bits // 32
            points = fields(whole(zeros)[first : math.ceil(end * bits / 32)], bits, 0)
            points = points[start - first * 32 // bits :][: end - start] - (1 << (bits - 1))
            numbers = numbers - points[:, group]
        return numbers * factors.float()[:, group]

    def ours(start: int, end: int) -> tuple[Tensor, Tensor]:
        codes, factors = integers(start, end)
        return codes, factors[:, 0].float() if bits == 8 else factors.repeat_interleave(count // GROUP, 1)

    native = groups == 1 if bits == 8 else scales.dtype == "BF16" and count % GROUP == 0
    plainly = not zeros and (group == torch.arange(inputs) // count).all()
    return StoredTensor([outputs, inputs], half(scales), plain, quantized=ours if native and plainly else None)
