"""Rotary positions in a config.json, in both directions: the keys of transformers 5 (rope_parameters) and earlier."""

import math
from collections.abc import Mapping
from typing import Any

from onward.base.errors import UserError
from onward.base.fields import nearest
from onward.config.decoder import DecoderConfig, Rotary, each
from onward.config.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    ProportionalScaling,
    Scaling,
    YaRNScaling,
    yarn_magnitude,
)
from onward.families._interface import HF
from onward.families._saving import require

LASTING = ("rope_theta", "partial_rotary_factor")
KINDS = ("default", "linear", "proportional", "dynamic", "yarn", "llama3", "longrope")


def rotary(
    hf: HF, *, context: int, theta: float = 10_000.0, fraction: float = 1.0, original: int | None = None
) -> Rotary:
    """The rotary positions of a config.json; `theta` and `fraction` are the family's defaults for missing keys,
    `original` is the context length in training for families that store it outside the table."""
    keys = {
        "rope_theta": hf.get("rope_theta", theta),
        "partial_rotary_factor": hf.get("partial_rotary_factor", fraction),
        **rope_table(hf),
    }
    original = original or keys.get("original_max_position_embeddings") or context
    scaled = scaling(keys, original, context)
    fraction = 1.0 if isinstance(scaled, ProportionalScaling) else keys["partial_rotary_factor"]
    return Rotary(keys["rope_theta"], fraction, scaled)


def rope_table(hf: HF) -> dict[str, Any]:
    """Return the table of rotary positions. rope_scaling replaces rope_parameters, as in transformers, except for theta
    and the rotated fraction, with which the weights were trained."""
    parameters, given = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    if tables := [key for key, value in {**parameters, **given}.items() if isinstance(value, Mapping)]:
        raise UserError(
            f"config.json has a table {tables[0]} for rotary positions: this family reads a single table for all layers"
        )
    if not given:
        return dict(parameters)
    return {key: parameters[key] for key in LASTING if key in parameters} | dict(given)


def scaling(keys: Mapping[str, Any], original: int, context: int) -> Scaling | None:
    """The scaling in rope_parameters or rope_scaling. `original` is the context length in training, `context` the
    extended context length."""
    kind = keys.get("rope_type", keys.get("type"))
    if kind is None and (factors := [key for key in keys if key.endswith("factor") and key not in LASTING]):
        raise UserError(
            f"config.json has {factors[0]} for rotary positions without their rope_type: {nearest('', KINDS)}"
        )
    factor = context / original if keys.get("factor") is None else keys["factor"]
    match kind:
        case "default" | None:
            return None
        case "linear":
            return LinearScaling(factor)
        case "proportional":
            return ProportionalScaling(keys["partial_rotary_factor"], keys.get("factor", 1.0))
        case "dynamic":
            return DynamicScaling(factor, context)
        case "yarn":
            attention_factor = keys.get("attention_factor")
            if attention_factor is None and keys.get("mscale") and keys.get("mscale_all_dim"):
                magnitudes = [yarn_magnitude(factor, keys[name]) for name in ("mscale", "mscale_all_dim")]
                attention_factor = magnitudes[0] / magnitudes[1]
            betas = keys.get("beta_fast") or 32.0, keys.get("beta_slow") or 1.0
            return YaRNScaling(factor, original, *betas, keys.get("truncate", True), attention_factor)
        case "llama3":
            return Llama3Scaling(factor, keys["low_freq_factor"], keys["high_freq_factor"], original)
        case "longrope":
            attention_factor = keys.get("attention_factor")
            if attention_factor is None:
                attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            return LongRoPEScaling(tuple(keys["short_factor"]), tuple(keys["long_factor"]), original, attention_factor)
    raise UserError(f"config.json has rope_type {kind!r}: {nearest(str(kind), KINDS)}")


def a_rotary(c: DecoderConfig) -> Rotary:
    """Return the rotary positions of the first layer that has them, or the default ones if no layer does."""
    return next((position for position in each(c.position) if isinstance(position, Rotary)), Rotary())


def without_rope(keys: HF) -> dict[str, Any]:
    """Return the keys of a config.json without the keys for rotary positions that apply to all layers."""
    return {key: value for key, value in keys.items() if key not in (*LASTING, "rope_scaling", "rope_parameters")}


def rope(part: object) -> dict[str, Any]:
    """The keys of a config.json for rotary positions."""
    position = require(part, Rotary)
    scaled: dict[str, Any] = {}
    match position.scaling:
        case LinearScaling(factor) | DynamicScaling(factor):
            scaled = {"factor": factor}
        case ProportionalScaling(fraction, factor):
            scaled = {"partial_rotary_factor": fraction} | ({"factor": factor} if factor != 1.0 else {})
        case YaRNScaling(factor, original, fast, slow, truncate, attention_factor):
            scaled = {"factor": factor, "beta_fast": fast, "beta_slow": slow, "truncate": truncate}
            scaled |= {"attention_factor": attention_factor} if attention_factor is not None else {}
            scaled |= {"original_max_position_embeddings": original}
        case Llama3Scaling(factor, low, high, original):
            scaled = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            scaled |= {"original_max_position_embeddings": original}
        case LongRoPEScaling(short, long, original, attention_factor):
            scaled = {"short_factor": list(short), "long_factor": list(long), "attention_factor": attention_factor}
            scaled |= {"original_max_position_embeddings": original}
    scaled = {"rope_type": position.scaling.kind if position.scaling else "default"} | scaled
    base = {"rope_theta": position.theta}
    base |= {"partial_rotary_factor": position.fraction} if position.fraction != 1.0 else {}
    return {
        "rope_parameters": scaled | base,
        **base,  # transformers before 5 reads these and the next key
        **({"rope_scaling": scaled} if position.scaling else {}),
    }
