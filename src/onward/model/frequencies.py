"""The frequencies of rotary positions under each scaling, in radians per position.

Shapes: B rows, P pairs of elements that are rotated together.
"""

import math

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.config.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    ProportionalScaling,
    Scaling,
    YaRNScaling,
)


def scaled_frequencies(part: Scaling, plain: Tensor, theta: float, rope_length: Tensor) -> Tensor:
    """Return the rotary frequencies, (P,) or (B, 1, P), that the scaling `part` (such as YaRN) puts in place of the
    unscaled `plain` (P,), which are theta ** (-p / P) for pair p.

    `rope_length` (B, 1, 1) is the length for which each row is scaled; the result is (P,) where a scaling ignores it.
    Raises a UserError for a scaling of your own without a method `frequencies`.
    """
    if part.frequencies is not None:
        return part.frequencies(plain, theta, rope_length)
    match part:
        case LinearScaling():
            return plain / part.factor
        case ProportionalScaling():
            rotated = int(part.fraction * plain.numel())
            return torch.cat([plain[:rotated] / part.factor, torch.zeros_like(plain[rotated:])])
        case DynamicScaling():
            return dynamic(part, plain, theta, rope_length)
        case YaRNScaling():
            return yarn(part, plain, theta)
        case Llama3Scaling():
            return llama3(part, plain)
        case LongRoPEScaling():
            long, short = plain.new_tensor(part.long), plain.new_tensor(part.short)
            return plain / torch.where(rope_length > part.original, long, short)
    raise UserError(
        f"the scaling {type(part).__name__} has no frequencies: give the class a method "
        "frequencies(plain, theta, rope_length) that returns them"
    )


def dynamic(part: DynamicScaling, plain: Tensor, theta: float, rope_length: Tensor) -> Tensor:
    """The frequencies of a theta that grows with the row's length (dynamic NTK)."""
    longer = rope_length.clamp(min=part.original) / part.original
    base = theta * (part.factor * longer - (part.factor - 1)) ** (plain.numel() / (plain.numel() - 1))
    return base ** (-plain.new_tensor(range(plain.numel())) / plain.numel())


def yarn(part: YaRNScaling, plain: Tensor, theta: float) -> Tensor:
    """Divide the frequencies of slow pairs by the factor, leave those of fast pairs unchanged, and blend between."""
    pairs = plain.numel()

    def pair(rotations: float) -> float:
        """The index of the pair that makes this many full rotations over the original context."""
        return pairs * math.log(part.original / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = pair(part.beta_fast), pair(part.beta_slow)
    if part.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = ((plain.new_tensor(range(pairs)) - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / part.factor * ramp + plain * (1 - ramp)


def llama3(part: Llama3Scaling, plain: Tensor) -> Tensor:
    """Divide low frequencies by the factor, leave high frequencies unchanged, and blend between."""
    rotations = plain * (part.original / (2 * math.pi))  # full rotations over the original context
    share = ((rotations - part.low_frequency) / (part.high_frequency - part.low_frequency)).clamp(0, 1)
    return plain * (share + (1 - share) / part.factor)
