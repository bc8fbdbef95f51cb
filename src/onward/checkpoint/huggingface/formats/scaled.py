"""Elements of 8 bits, fp8 or integers, times a scale: for the whole tensor, for each output, or for each block.

Used by DeepSeek-V3 (arXiv:2412.19437, section 3.3), the formats float-quantized, int-quantized and naive-quantized of
compressed-tensors, ModelOpt's FP8 and fbgemm. Shapes: O outputs, I inputs; experts may be stacked before them.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.huggingface.formats.parts import Config, Parts, half, refusal, whole
from onward.checkpoint.weights import FLOATS, StoredTensor

FP8 = "F8_E4M3", "F8_E5M2"
EXPONENTS = "U8", "F8_E8M0"  # scales that are powers of two, E8M0 of OCP Microscaling Formats


def fp8(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A matrix, or one for each expert, in fp8 with the scales `_scale_inv` of blocks; blocks at the edges may be
    smaller. By default, blocks are 128 by 128; if weight_block_size is null, a matrix has one scale."""
    weight, scales = parts[""], parts["_scale_inv"]
    match config.get("weight_block_size", [128, 128]):
        case [int(height), int(width)] if height > 0 < width:
            kind = f"fp8 in blocks of {height} by {width}"
        case None:
            height, width = [*weight.shape, 1, 1][-2:] if len(weight.shape) < 2 else weight.shape[-2:]
            kind = "fp8 with one scale"
        case other:
            raise UserError(f"config.json has weight_block_size {other}: Onward reads two positive integers, or null")
    if weight.dtype not in FP8 or len(weight.shape) not in (2, 3):
        raise refusal(name, weight, scales, kind)
    return blocks(name, weight, scales, height, width, kind)


def elements(name: str, parts: Parts, config: Config) -> StoredTensor:
    """A matrix of fp8 or int8 with scales `weight_scale`, and for int8 zero points `weight_zero_point`. The shape of
    the scales determines which elements share a scale; config.json has the sizes of blocks and groups."""
    weight, scales, zeros = parts[".weight"], parts[".weight_scale"], parts.get(".weight_zero_point")
    kind = "fp8 or int8 with a scale for all elements, each output or each block"
    shape = scales.shape if len(scales.shape) > 1 else [*scales.shape, 1, 1][:2]
    if weight.dtype not in (*FP8, "I8") or len(weight.shape) != 2:
        raise refusal(name, weight, scales, kind)
    outputs, inputs = weight.shape
    fitting = {
        (min(height, outputs), min(width, inputs))
        for height, width in [(outputs, inputs), (1, inputs), *block_sizes(config)]
        if shape == [-(-outputs // height), -(-inputs // width)]
    }
    if len(fitting) != 1:
        raise refusal(name, weight, scales, kind)
    return blocks(name, weight, scales, *fitting.pop(), kind, zeros)


def block_sizes(config: Config) -> Iterator[tuple[int, int]]:
    """The sizes of the blocks and groups in config.json."""
    for scheme in weight_schemes(config):
        match scheme.get("block_structure"), scheme.get("group_size"):
            case [int(height), int(width)], _ if height > 0 < width:
                yield height, width
            case _, int(size) if size > 0:
                yield 1, size


def weight_schemes(config: Config) -> list[Config]:
    groups = config.get("config_groups")
    tables = groups.values() if isinstance(groups, dict) else []
    return [table["weights"] for table in tables if isinstance(table, dict) and isinstance(table.get("weights"), dict)]


def blocks(
    name: str,
    weight: StoredTensor,
    scales: StoredTensor,
    height: int,
    width: int,
    kind: str,
    zeros: StoredTensor | None = None,
) -> StoredTensor:
    """A weight (O, I) or (experts, O, I) with one scale for each block of `height` outputs and `width` inputs."""
    *experts, outputs, inputs = weight.shape
    grid = [*experts, -(-outputs // height), -(-inputs // width)]
    shapes = [grid, *([grid[:-1]] if grid[-1] == 1 else []), *([[], experts] if grid[-2:] == [1, 1] else [])]
    fits = scales.shape in shapes and math.prod(scales.shape) == math.prod(grid)
    if not fits or scales.dtype not in (*FLOATS, *EXPONENTS) or (zeros and zeros.shape != scales.shape):
        raise refusal(name, weight, scales, kind)

    def spread(tensor: StoredTensor, start: int, end: int) -> Tensor:
        whole_grid = whole(tensor).view(grid)
        part = whole_grid[start:end] if experts else whole_grid[start // height : -(-end // height)]
        numbers = exponentials(part) if tensor.dtype == "U8" else part.float()
        first, rows = (0, outputs) if experts else (start % height, end - start)
        return numbers.repeat_interleave(height, -2)[..., first : first + rows, :]

    def read(start: int, end: int) -> Tensor:
        numbers = weight.rows(start, end).float()
        if zeros:
            numbers = numbers - spread(zeros, start, end).repeat_interleave(width, -1)[..., :inputs]
        return numbers * spread(scales, start, end).repeat_interleave(width, -1)[..., :inputs]

    def ours(start: int, end: int) -> tuple[Tensor, Tensor]:
        return weight.rows(start, end), spread(scales, start, end)[:, 0]

    native = weight.dtype == "I8" and not experts and not zeros and grid == [outputs, 1]
    return StoredTensor(weight.shape, half(scales), read, quantized=ours if native else None)


def exponentials(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
