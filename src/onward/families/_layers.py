"""Layers with and without a window in a config.json, in both directions."""

from collections.abc import Callable, Sequence
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, at
from onward.families import HF

LOCAL, FULL = "sliding_attention", "full_attention"


def windowed_layers(hf: HF, default: Sequence[bool]) -> list[bool]:
    """Return for each layer whether it attends to a sliding window: as the key `layer_types` of `hf`, the content of a
    config.json, says or, without this key, as `default` says, whose length is the number of layers. Raises a UserError
    for other types of layers, and if their number is wrong."""
    types = hf.get("layer_types") or [LOCAL if local else FULL for local in default]
    if len(types) != len(default) or not {*types} <= {LOCAL, FULL}:
        raise UserError(f"config.json has layer_types {types}: Onward reads {LOCAL} and {FULL}, one for each layer")
    return [kind == LOCAL for kind in types]


def windows(hf: HF, layers: int, window: int | None, local: Callable[[int], bool]) -> list[int]:
    """Return the number of tokens of the attention window of each of `layers` layers, 0 for no window. A layer has a
    window of `window` tokens (None: no layer has one) if the key `layer_types` of `hf`, the content of a config.json,
    says so or, without this key, if `local(layer)` is true."""
    has_window = windowed_layers(hf, [local(layer) for layer in range(layers)])
    return [window or 0 if one else 0 for one in has_window]


def layer_types(c: DecoderConfig) -> dict[str, Any]:
    """Return the keys `layer_types` and `sliding_window` of a config.json for a decoder with configuration `c`: which
    layers have an attention window, and its length in tokens."""
    windows = [at(c.attention, layer).window for layer in range(c.n_layers)]
    return {"layer_types": [LOCAL if w else FULL for w in windows], "sliding_window": max(windows) or None}
