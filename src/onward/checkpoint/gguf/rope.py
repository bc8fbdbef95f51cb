"""Rotary positions in GGUF: their keys, and the tensors of factors by which frequencies are divided."""

from __future__ import annotations

import math
from typing import Any

import torch

from onward.base.errors import UserError
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.tensors import rows
from onward.config.decoder import DecoderConfig, Rotary, at
from onward.config.scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    ProportionalScaling,
    Scaling,
    YaRNScaling,
    yarn_magnitude,
)
from onward.model.frequencies import scaled_frequencies

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
MOST = 1 << 16  # maximum number of factors in a tensor
UNROTATED = 1e30  # divides the frequencies of pairs that are not rotated
KINDS = "none", "linear", "yarn", "longrope"


def rotary(keys: Keys, sizes: dict[str, Any]) -> Rotary:
    width = sizes["d_head"]
    rotated = keys.number("rope.dimension_count", width)
    theta, context = keys.number("rope.freq_base", 10_000.0), sizes["context_length"]
    return Rotary(theta, fraction(rotated, width), scaling(keys, theta, context, rotated))


def unscaled(keys: Keys, theta: float, part: float = 1.0) -> Rotary:
    """The positions of the layers with a window, which llama.cpp does not scale, on a fraction of a head; `theta` is
    the default base."""
    if (weight := keys.number("rope.scaling.attn_factor", 1.0)) != 1.0:
        raise UserError(
            f"rope.scaling.attn_factor is {weight}, by which llama.cpp also multiplies layers with a window, whose "
            "positions are not scaled: Onward does not support this"
        )
    return Rotary(keys.number("rope.freq_base_swa", theta), part)


def fraction(rotated: int, width: int) -> float:
    """Return the `fraction` of a Rotary that rotates `rotated` elements in a head of `width` elements."""
    part = rotated / width
    return part if int(width * part) == rotated else math.nextafter(part, 1.0)


def scaling(keys: Keys, theta: float, context: int, rope_dim: int) -> Scaling | None:
    original = keys.number("rope.scaling.original_context_length", context)
    weight, kind = keys.number("rope.scaling.attn_factor", 1.0), keys.get("rope.scaling.type", "linear")
    if kind not in KINDS:
        raise UserError(f"rope.scaling.type is {kind!r:.40}: Onward reads none, linear, yarn and longrope")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    listed = [name for name in ((LONG, SHORT) if kind == "longrope" else (FREQS, LONG, SHORT)) if keys.has(name)]
    if kind == "yarn":
        if listed:
            raise UserError(
                f"rope.scaling.type is yarn and the file has {listed[0]}, a combination that Onward does not support"
            )
        return YaRNScaling(
            factor, original, attention_factor=None if weight == 1.0 else weight * yarn_magnitude(factor)
        )
    factor = 1.0 if kind == "none" else factor
    if FREQS in listed:
        short = long = factors(keys, FREQS)[: rope_dim // 2]  # the file may have more, for layers without scaling
        if (factor, weight) == (1.0, 1.0):
            return llama3(short, theta, context, rope_dim)
        original = context
    elif listed == [LONG, SHORT]:
        short, long = (factors(keys, name)[: rope_dim // 2] for name in (SHORT, LONG))
    elif weight == 1.0:
        return LinearScaling(factor) if factor != 1.0 else None
    else:
        short = long = (1.0,) * (rope_dim // 2)
    short, long = (tuple(own * factor for own in each) for each in (short, long))
    return LongRoPEScaling(short, long, original, weight)


def factors(keys: Keys, name: str) -> tuple[float, ...]:
    """Read a tensor with a factor for each rotated pair of elements."""
    info = keys.header.tensors[name]
    if len(info.shape) != 1 or info.shape[0] > MOST or info.type.plain is None:
        raise UserError(f"{name} is {list(info.shape)} {info.type.name}, not a list of factors: get the file again")
    values = keys.header.values.get(name)
    return tuple((rows(info, 0.0, 0, info.shape[0]) if values is None else values).tolist())


def llama3(factors: tuple[float, ...], theta: float, context: int, rope_dim: int) -> Scaling:
    """Llama 3's scaling with its usual constants if these give the same divisors, else LongRoPE's list of factors."""
    factor = max(factors)
    for original in (8192, context // max(1, round(factor)), context, 2048, 4096, 16_384):
        guess = Llama3Scaling(factor, 1.0, 4.0, max(1, original))
        if len(factors) * 2 == rope_dim and torch.allclose(
            divisors(guess, theta, rope_dim), torch.tensor(factors), rtol=1e-6
        ):
            return guess
    return LongRoPEScaling(factors, factors, context, 1.0)


def divisors(part: Llama3Scaling, theta: float, rope_dim: int) -> torch.Tensor:
    """The numbers by which a scaling divides the rotary frequencies, fp32 (rope_dim / 2,)."""
    plain = theta ** -(torch.arange(rope_dim // 2, dtype=torch.float64) * 2 / rope_dim)
    return (plain / scaled_frequencies(part, plain, theta, torch.tensor(0))).float()


def rope_keys(c: DecoderConfig) -> dict[str, Any]:
    """Keys for the rotary positions of the layers without a window or, if all have one, of all layers."""
    parts = [at(c.position, layer) for layer in range(c.n_layers)]
    global_positions = [
        p for layer, p in enumerate(parts) if isinstance(p, Rotary) and not at(c.attention, layer).window
    ]
    position = next(iter(global_positions or [p for p in parts if isinstance(p, Rotary)]), None)
    if position is None:
        return {}
    keys: dict[str, Any] = {"rope.dimension_count": position.rope_dim(c.d_head), "rope.freq_base": position.theta}
    match position.scaling:
        case LinearScaling(factor):
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case YaRNScaling(factor=factor, original=original, attention_factor=weight, beta_fast=fast, beta_slow=slow):
            keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
            keys |= {"rope.scaling.yarn_beta_fast": fast, "rope.scaling.yarn_beta_slow": slow}
            keys |= {"rope.scaling.original_context_length": original}
            if weight is not None and not math.isclose(weight, yarn_magnitude(factor), rel_tol=1e-6):
                keys["rope.scaling.attn_factor"] = weight / yarn_magnitude(factor)
        case LongRoPEScaling(original=original, attention_factor=weight):
            keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": original}
            keys["rope.scaling.attn_factor"] = weight
    return keys


def rope_tensors(c: DecoderConfig) -> dict[str, torch.Tensor]:
    """Tensors with factors of the rotary frequencies, fp32, if the scaling of a layer needs any."""
    for layer in range(c.n_layers):
        position = at(c.position, layer)
        if not isinstance(position, Rotary):
            continue
        rope_dim = position.rope_dim(at(c.attention, layer).rope_width(c))
        match position.scaling:
            case Llama3Scaling() as part:
                return {FREQS: divisors(part, position.theta, rope_dim)}
            case ProportionalScaling(fraction=fraction):
                rotated = round(fraction * rope_dim / 2)
                return {FREQS: torch.tensor([1.0] * rotated + [UNROTATED] * (rope_dim // 2 - rotated))}
            case LongRoPEScaling(short=short, long=long):
                return {LONG: torch.tensor(long), SHORT: torch.tensor(short)}
    return {}
