"""Weights of MLX folders: integers of 2 to 8 bits times a scale, plus a bias, both for a group of inputs.

Shapes: O outputs, I inputs, G groups of inputs with the same scale and bias.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.huggingface.formats.parts import Config, Parts, half, is_float, refusal
from onward.checkpoint.weights import StoredTensor


def affine(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A matrix stored as words of 32 bits (O, words), in which the integers of a row follow each other from the lowest
    bits on, across words; `scales` and `biases` (O, G). A table for a module replaces the config's `group_size` and
    `bits`."""
    weight, scales, biases = parts[".weight"], parts[".scales"], parts[".biases"]
    own = config.get(name.removesuffix(".weight"))
    table = {**config, **own} if isinstance(own, Mapping) else config
    bits, size, mode = table.get("bits"), table.get("group_size"), table.get("mode", "affine")
    if mode != "affine" or not isinstance(bits, int) or not isinstance(size, int):
        raise UserError(
            f"config.json has a quantization with mode {mode!r}, bits {bits} and group_size {size}: Onward reads "
            "'affine' integers of MLX, so get the weights in another format"
        )
    outputs, groups = scales.shape if len(scales.shape) == 2 else (0, 0)
    inputs = groups * size
    if (
        weight.dtype != "U32"
        or not 2 <= bits <= 8
        or not is_float(scales, biases)
        or biases.shape != scales.shape
        or weight.shape != [outputs, inputs * bits // 32]
        or inputs * bits % 32
    ):
        raise refusal(name, weight, scales, f"a matrix of MLX with {bits} bits in groups of {size}")

    def integers(start: int, end: int) -> Tensor:
        """(rows, I): a row is a sequence of bits."""
        octets = weight.rows(start, end).contiguous().view(torch.uint8).view(end - start, -1)
        single = octets[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
        places = 1 << torch.arange(bits)
        return (single.view(end - start, inputs, bits) * places).sum(-1)

    def read(start: int, end: int) -> Tensor:
        start, end, _ = slice(start, end).indices(outputs)
        factors, shifts = (part.rows(start, end).float().repeat_interleave(size, 1) for part in (scales, biases))
        return integers(start, end) * factors + shifts

    return StoredTensor([outputs, inputs], half(scales), read)
