"""Vectors of positions that are added to embeddings, and biases of scores.

A position part of your own may bring its own slopes and bias (`config/part_types.py`).
Shapes: B batch, T tokens in this call, D d_model, H heads.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.config.decoder import Alibi, DecoderConfig, Position
from onward.model.rotary import angles_at

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
