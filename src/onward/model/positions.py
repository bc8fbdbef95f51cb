"""Positions: vectors added to embeddings, rotations of queries and keys, and biases of scores.

A position part of your own may bring its own rotation, slopes and bias (`config/part_types.py`).
Shapes: B batch, T tokens in this call, D d_model, H heads, E d_head.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.config.decoder import Alibi, DecoderConfig, Position, Rotary
from onward.config.scaling import Scaling
from onward.model.frequencies import scaled_frequencies

ScoreBias = Callable[[Tensor, Tensor, Tensor], Tensor]  # slope, query position, key position -> bias, elementwise


class LearnedPositionModule(nn.Module):
    """A table of trained position vectors, which are added to the embeddings: positions (B, T) -> (B, T, D)."""

    def __init__(self, length: int, width: int, offset: int) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(length + offset, width))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        rows = (positions + self.offset).clamp(max=len(self.weight) - 1)  # padding may lie beyond
        return nn.functional.embedding(rows, self.weight).to(dtype)


class SinusoidalPositionModule(nn.Module):
    """Fixed position vectors, which are added to the embeddings, sines at even and cosines at odd indices (Vaswani et
    al. 2017): positions (B, T) -> (B, T, D)."""

    def __init__(self, width: int, theta: float) -> None:
        super().__init__()
        self.width, self.theta = width, theta

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        angles = angles_at(positions.to(torch.promote_types(dtype, torch.float32)), self.theta, self.width)
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(dtype)


def angles_at(
    positions: Tensor, theta: float, rope_dim: int, scaling: Scaling | None = None, rope_length: Tensor | None = None
) -> Tensor:
    """Return the rotation angle of each pair i of elements at positions (B, T): position * theta ** (-2 i / rope_dim),
    as (B, T, rope_dim / 2). `rope_dim` is the number of rotated elements of a head.

    A `scaling` (such as YaRN) changes the frequencies, for rows of the lengths `rope_length` (B, 1, 1).
    """
    pairs = torch.arange(0, rope_dim, 2, device=positions.device, dtype=positions.dtype)
    frequencies = theta ** (-pairs / rope_dim)
    if scaling is not None and rope_length is not None:
        frequencies = scaled_frequencies(scaling, frequencies, theta, rope_length)
    return positions[..., None] * frequencies


def rotates(part: Position) -> bool:
    """Return whether a position part of a config rotates queries and keys, as Rotary does."""
    return part.rotation is not None or isinstance(part, Rotary)


def rotation(part: Position, width: int, positions: Tensor, rope_length: Tensor) -> tuple[Tensor, Tensor] | None:
    """Compute the rotary rotation of heads of size `width`: cosines and sines, each (B, T, 1, rope_dim / 2); None if
    `part`, the position part of the config, rotates nothing.

    `positions` (B, T) and `rope_length` (B, 1, 1), the length for which each row's frequencies are scaled, have the
    dtype to compute in, at least fp32.
    """
    if part.rotation is not None:
        return part.rotation(width, positions, rope_length)
    return rotary(part, width, positions, rope_length) if isinstance(part, Rotary) else None


def rotary(part: Rotary, width: int, positions: Tensor, rope_length: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of rotary positions, each (B, T, 1, rope_dim / 2), for the position part `part`;
    the other arguments are those of `rotation`."""
    angles = angles_at(positions, part.theta, part.rope_dim(width), part.scaling, rope_length)[:, :, None]
    magnitude = part.scaling.magnitude if part.scaling else 1.0
    return angles.cos() * magnitude, angles.sin() * magnitude


def score_bias(part: Position, config: DecoderConfig, device: torch.device) -> tuple[Tensor, ScoreBias] | None:
    """Return the slope of each head, (H,), and the function that computes the bias of an attention score from a slope
    and two positions; None if `part`, the position part of the config, adds no bias. Raises a UserError for a part with
    slopes and no `score_bias`."""
    if part.slopes is not None:
        slopes = part.slopes(config, device)
    else:
        slopes = alibi_slopes(config.n_heads, part.steepness).to(device) if isinstance(part, Alibi) else None
    if slopes is None:
        return None
    if part.score_bias is not None:
        return slopes, partial(part.score_bias, config)
    if isinstance(part, Alibi):
        return slopes, linear_bias
    raise UserError(
        f"the position {type(part).__name__} has slopes and no bias: give the class a method "
        "score_bias(config, slope, query, key) that returns it"
    )


def alibi_slopes(n_heads: int, steepness: float = 8.0) -> Tensor:
    """Return the slope of each head, (H,), the amount that ALiBi subtracts from a score per token of distance: 2 **
    (-steepness (h + 1) / H), and between the powers of two as in Press et al. (2021)."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-steepness * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-steepness * (2 * h + 1) / (2 * power)) for h in range(n_heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)


def linear_bias(slope: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the ALiBi bias slope * (key - query) of an attention score, for the positions `query` and `key`: 0 or
    less, in proportion to their distance."""
    return slope.to(query) * (key - query)
