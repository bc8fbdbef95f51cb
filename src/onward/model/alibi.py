"""Biases of attention scores, as in ALiBi: minus the slope of a head times the distance between two positions.

A custom position part may define its own slopes and bias (`config/part_types.py`). Shapes: H heads.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.config.decoder import Alibi, DecoderConfig, Position

ScoreBias = Callable[[Tensor, Tensor, Tensor], Tensor]  # slope, query position, key position -> bias, elementwise


def score_bias(
    part: Position, config: DecoderConfig, n_heads: int, device: torch.device
) -> tuple[Tensor, ScoreBias] | None:
    """Return the slope of each of a layer's `n_heads` heads, (H,), and the function that computes the bias of an
    attention score from a slope and two positions; None if `part`, the position part of the layer, adds no bias. Raises
    a UserError if the part has another number of slopes, or slopes but no `score_bias`."""
    if part.slopes is not None:
        slopes = part.slopes(config, device)
    else:
        slopes = alibi_slopes(n_heads, part.steepness).to(device) if isinstance(part, Alibi) else None
    if slopes is None:
        return None
    if len(slopes) != n_heads:
        raise UserError(
            f"Cannot bias scores by the position {type(part).__name__}, because it has {len(slopes)} slopes for a "
            f"layer of {n_heads} heads: give all layers the same number of heads (n_heads)"
        )
    if part.score_bias is not None:
        return slopes, partial(part.score_bias, config)
    if isinstance(part, Alibi):
        return slopes, linear_bias
    raise UserError(
        f"the position {type(part).__name__} has slopes but no bias: give the class a method "
        "score_bias(config, slope, query, key) that returns it"
    )


def alibi_slopes(n_heads: int, steepness: float = 8.0) -> Tensor:
    """Return the slope of each head, (H,), the amount that ALiBi subtracts from a score per token of distance: 2 **
    (-steepness (h + 1) / H) if H is a power of two, otherwise as in Press et al. (2021)."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-steepness * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-steepness * (2 * h + 1) / (2 * power)) for h in range(n_heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)


def linear_bias(slope: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return slope.to(query) * (key - query)
