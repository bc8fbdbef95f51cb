"""Positions: vectors added to embeddings, rotations of queries and keys, and slopes of scores.

Shapes: B batch, T tokens in this call, D d_model, H heads, E d_head.
"""

import math

import torch
from torch import Tensor, nn

from onward.config.scaling import Scaling


class LearnedPositionModule(nn.Module):
    """A trained vector per position: positions (B, T) -> (B, T, D)."""

    def __init__(self, length: int, width: int, offset: int) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(length + offset, width))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        rows = (positions + self.offset).clamp(max=len(self.weight) - 1)  # padding may lie beyond
        return nn.functional.embedding(rows, self.weight).to(dtype)


class SinusoidalPositionModule(nn.Module):
    """Sines at even and cosines at odd indices (Vaswani et al. 2017): positions (B, T) -> (B, T, D)."""

    def __init__(self, width: int, theta: float) -> None:
        super().__init__()
        self.width, self.theta = width, theta

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        angles = angles_at(positions.to(torch.promote_types(dtype, torch.float32)), self.theta, self.width)
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(dtype)


def angles_at(
    positions: Tensor, theta: float, rope_dim: int, scaling: Scaling | None = None, rope_length: Tensor | None = None
) -> Tensor:
    """The angle of each pair at positions (B, T): position * theta ** (-2 i / rope_dim), (B, T, rope_dim / 2).

    A `scaling` changes the frequencies, for rows made for the lengths `rope_length` (B, 1, 1).
    """
    pairs = torch.arange(0, rope_dim, 2, device=positions.device, dtype=positions.dtype)
    frequencies = theta ** (-pairs / rope_dim)
    if scaling is not None and rope_length is not None:
        frequencies = scaling.frequencies(frequencies, theta, rope_length)
    return positions[..., None] * frequencies


def rotation(
    theta: float, rope_dim: int, positions: Tensor, scaling: Scaling | None = None, rope_length: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles at positions (B, T), each (B, T, 1, rope_dim / 2)."""
    angles = angles_at(positions, theta, rope_dim, scaling, rope_length)[:, :, None]
    magnitude = scaling.magnitude if scaling else 1.0
    return angles.cos() * magnitude, angles.sin() * magnitude


def alibi_slopes(n_heads: int, steepness: float = 8.0) -> Tensor:
    """What each head subtracts per token of distance, (H,): 2 ** (-steepness (h + 1) / H), and between the powers of
    two as in Press et al. (2021)."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-steepness * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-steepness * (2 * h + 1) / (2 * power)) for h in range(n_heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)
