"""Rotary positions: the angles by which queries and keys are rotated.

Shapes: B batch, T tokens in this call.
"""

import torch
from torch import Tensor

from onward.config.decoder import Position, Rotary
from onward.config.scaling import Scaling
from onward.model.frequencies import scaled_frequencies


def rotates(part: Position) -> bool:
    return part.rotation is not None or isinstance(part, Rotary)


def rotation(part: Position, width: int, positions: Tensor, rope_length: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the cosines and sines, each (B, T, 1, rope_dim / 2), by which heads of size `width` are rotated; None if
    `part` rotates nothing.

    `positions` (B, T) and `rope_length` (B, 1, 1), the length for which each row's frequencies are scaled, have the
    dtype to compute in, at least fp32.
    """
    if part.rotation is not None:
        return part.rotation(width, positions, rope_length)
    return rotary(part, width, positions, rope_length) if isinstance(part, Rotary) else None


def rotary(part: Rotary, width: int, positions: Tensor, rope_length: Tensor) -> tuple[Tensor, Tensor]:
    angles = angles_at(positions, part.theta, part.rope_dim(width), part.scaling, rope_length)[:, :, None]
    magnitude = part.scaling.magnitude if part.scaling else 1.0
    return angles.cos() * magnitude, angles.sin() * magnitude


def angles_at(
    positions: Tensor, theta: float, rope_dim: int, scaling: Scaling | None = None, rope_length: Tensor | None = None
) -> Tensor:
    """Return the angle of each pair i of elements, position * theta ** (-2 i / rope_dim), as (B, T, rope_dim / 2), or
    with the frequencies of a `scaling` (such as YaRN) for rows of the lengths `rope_length` (B, 1, 1)."""
    pairs = torch.arange(0, rope_dim, 2, device=positions.device, dtype=positions.dtype)
    frequencies = theta ** (-pairs / rope_dim)
    if scaling is not None and rope_length is not None:
        frequencies = scaled_frequencies(scaling, frequencies, theta, rope_length)
    return positions[..., None] * frequencies
