"""Quantized linear layers on disk, in the format `pack-quantized` of the compressed-tensors library: for a weight, its
integers packed into int32 (`weight_packed`), its scales (`weight_scale`) and its shape (`weight_shape`).

Integers of 4 or 8 bits, plus 8 or 128, follow each other from the lowest bits of an int32 to its highest; rows are
padded to a whole int32.
Shapes: O outputs, I inputs, G groups of inputs with the same scale.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onward.kernels.quantized import GROUP, unpack
from onward.transforms.quantize import Precision, QuantizedLinear

FORMAT = "pack-quantized"  # read by transformers and vLLM, unlike any format of our own
BITS: dict[Precision, int] = {"int8": 8, "int4": 4}


def unpacked(words: Tensor, bits: int, inputs: int) -> Tensor:
    """Convert int32 words (O, words) to integers (O, I) of 4 or 8 bits, in int8."""
    integers = words.contiguous().view(torch.uint8)
    if bits == 4:
        integers = torch.stack([integers & 15, integers >> 4], 2).flatten(1)
    return (integers[:, :inputs] - (1 << (bits - 1))).view(torch.int8)


def packed(integers: Tensor, bits: int) -> Tensor:
    """Convert int8 integers (O, I) of 4 or 8 bits to int32 (O, words)."""
    words = math.ceil(integers.size(1) * bits / 32)
    codes = integers.new_zeros(len(integers), words * 32 // bits, dtype=torch.uint8)
    codes[:, : integers.size(1)] = integers.view(torch.uint8) + (1 << (bits - 1))
    if bits == 4:
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    return codes.view(torch.int32)


Change = Callable[[Tensor], Tensor]


def moves_rows(change: Change, outputs: int) -> bool:
    """Whether `change` only reorders the rows of a weight, so that it also applies to quantized integers and their
    scales."""
    indices = torch.arange(3 * outputs).view(outputs, 3)
    try:
        moved = change(indices)
    except (RuntimeError, ValueError, IndexError):
        return False
    return moved.shape == indices.shape and torch.equal(moved, moved[:, :1] + torch.arange(3))


def packed_tensors(name: str, layers: Sequence[QuantizedLinear], change: Change) -> Iterator[tuple[str, Tensor]]:
    """The tensors `name`_packed, _scale and _shape that store layers as the rows of one weight."""
    bits, inputs = BITS[layers[0].precision], layers[0].in_features
    outputs = sum(layer.out_features for layer in layers)
    words, groups = math.ceil(inputs * bits / 32), layers[0].scales.view(layers[0].out_features, -1).size(1)
    if layers[0].codes.is_meta:
        yield f"{name}_packed", torch.empty(outputs, words, dtype=torch.int32, device="meta")
        yield f"{name}_scale", torch.empty(outputs, groups, dtype=layers[0].scales.dtype, device="meta")
    else:
        yield f"{name}_packed", packed(change(torch.cat([unpack(layer.codes) for layer in layers])), bits)
        yield f"{name}_scale", change(torch.cat([layer.scales.view(-1, groups) for layer in layers]))
    yield f"{name}_shape", torch.tensor([outputs, inputs])


def quantization_config(precisions: Mapping[str, Precision], plain: Sequence[str]) -> dict[str, Any]:
    """The quantization_config of config.json; `plain` names the linear layers that are not quantized."""
    by_precision: dict[Precision, list[str]] = {}
    for name, precision in precisions.items():
        by_precision.setdefault(precision, []).append(name)
    groups = {}
    most = max(by_precision, key=lambda precision: len(by_precision[precision]))
    for i, (precision, names) in enumerate(sorted(by_precision.items(), key=lambda item: item[0] == most)):
        size = {"strategy": "channel"} if precision == "int8" else {"strategy": "group", "group_size": GROUP}
        weights = {"num_bits": BITS[precision], "type": "int", "symmetric": True, "dynamic": False, **size}
        head = [name for name in names if "." not in name]  # also by name, because vLLM's head is not a Linear
        targets = ["Linear", *head] if precision == most else names  # names come first, since the first match counts
        groups[f"group_{i}"] = {"targets": targets, "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(plain),
    }
