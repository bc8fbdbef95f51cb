"""Layers with and without a window in a config.json, in both directions."""

from collections.abc import Callable, Sequence
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, at
from onward.families import HF

LOCAL, FULL = "sliding_attention", "full_attention"


def windowed_layers(hf: HF, default: Sequence[bool]) -> list[bool]:
    """Whether each layer attends to a sliding window, by `layer_types` or, without this key, `default`."""
    types = hf.get("layer_types") or [LOCAL if local else FULL for local in default]
    if len(types) != len(default) or not {*types} <= {LOCAL, FULL}:
        raise UserError(f"config.json has layer_types {types}: Onward reads {LOCAL} and {FULL}, one for each layer")
    return [kind == LOCAL for kind in types]


def windows(hf: HF, layers: int, window: int | None, local: Callable[[int], bool]) -> list[int]:
    """Tokens of each layer's window, 0 for none, by `layer_types` or, without this key, `local(layer)`."""
    has_window = windowed_layers(hf, [local(layer) for layer in range(layers)])
    return [window or 0 if one else 0 for one in has_window]


def layer_types(c: DecoderConfig) -> dict[str, Any]:
    windows = [at(c.attention, layer).window for layer in range(c.n_layers)]
    return {"layer_types": [LOCAL if w else FULL for w in windows], "sliding_window": max(windows) or None}
