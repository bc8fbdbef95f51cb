"""Layers of different types in a config.json, in both directions: their windows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, SelfAttention, at
from onward.families import HF

LOCAL, FULL = "sliding_attention", "full_attention"


def windowed_layers(hf: HF, default: Sequence[bool]) -> list[bool]:
    """Whether each layer attends to a sliding window, by `layer_types` or, without this key, `default`."""
    types = hf.get("layer_types") or [LOCAL if local else FULL for local in default]
    if len(types) != len(default) or not {*types} <= {LOCAL, FULL}:
        raise UserError(f"config.json has layer_types {types}: Onward reads {LOCAL} and {FULL}, one for each layer")
    return [kind == LOCAL for kind in types]


def windowed_parts(hf: HF, part: SelfAttention, window: int | None, local: Sequence[bool]) -> tuple[SelfAttention, ...]:
    """Return `part` for each layer, with a sliding window in the layers that `layer_types` or, without this key,
    `local` selects."""
    return tuple(replace(part, window=(window or 0) * is_local) for is_local in windowed_layers(hf, local))


def layer_types(c: DecoderConfig) -> dict[str, Any]:
    """Return the keys of a config.json for windows; the key for the window length is included only if a layer has a
    window."""
    windows = [at(c.attention, layer).window for layer in range(c.n_layers)]
    length = {"sliding_window": max(windows)} if any(windows) else {}
    return {"layer_types": [LOCAL if window else FULL for window in windows], **length}
