"""Extends the context of a trained decoder with rotary positions by scaling their frequencies."""

from __future__ import annotations

import math
from dataclasses import replace

from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.config.decoder import DecoderConfig, Rotary, each
from onward.config.scaling import DynamicScaling, LinearScaling, Llama3Scaling, Scaling, YaRNScaling

SCALINGS: dict[str, type[LinearScaling | DynamicScaling | YaRNScaling | Llama3Scaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "yarn": YaRNScaling,
    "llama3": Llama3Scaling,
}
MOST = 1000  # maximum factor


def extended(config: DecoderConfig, rope: str) -> DecoderConfig:
    """Return a copy of a config with scaled rotary positions, and a context longer by the same factor. `rope` is a
    scaling and its factor: "yarn:2", "linear:4", "dynamic:2" or "llama3:8". The weights do not change.

    Raises a UserError for an unknown scaling, a factor of 1 or less or above MOST, and positions that are not rotary or
    already scaled.
    """
    kind, _, number = rope.partition(":")
    if kind not in SCALINGS:
        raise UserError(
            f"Cannot scale positions by rope={rope!r}, because {kind!r} is not a scaling: {nearest(kind, SCALINGS)}"
        )
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if not 1 < factor <= MOST:
        raise UserError(
            f"Cannot read the factor of rope={rope!r}: give a number above 1 and at most {MOST} after a colon, as in "
            "yarn:2"
        )
    rotary = [position for position in each(config.position) if isinstance(position, Rotary)]
    if not rotary:
        raise UserError(
            f"Cannot scale positions by rope={rope!r}, because this model has no rotary positions: load it without rope"
        )
    if any(position.scaling is not None for position in rotary):
        raise UserError(
            f"Cannot scale positions by rope={rope!r}, because they are scaled already: load the model without rope"
        )
    scaling = scaling_of(kind, factor, config.context_length)
    positions = tuple(replace(p, scaling=scaling) if isinstance(p, Rotary) else p for p in each(config.position))
    return replace(config, position=positions, context_length=int(config.context_length * factor))


def scaling_of(kind: str, factor: float, original: int) -> Scaling:
    """The scaling for a context `factor` times as long as `original`, the context length in training."""
    if kind == "linear":
        return LinearScaling(factor=factor)
    return SCALINGS[kind](factor=factor, original=original)  # type: ignore[call-arg]
