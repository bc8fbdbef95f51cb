"""Layers that use the keys and values of earlier layers (Gemma 3n). Does not import torch."""

from __future__ import annotations

from onward.base.errors import UserError
from onward.config.part_types import ConfigFields, at


def kv_source(config: ConfigFields, layer: int) -> int:
    """Return the layer whose keys and values `layer` uses: itself or, if it shares them, the nearest earlier layer with
    its own keys and values and the same window."""
    part = at(config.attention, layer)
    if not part.shares_kv:
        return layer
    for earlier in reversed(range(layer)):
        other = at(config.attention, earlier)
        if (other.shares_kv, other.window, other.chunked) == (False, part.window, part.chunked):
            return earlier
    raise UserError(
        f"attention.shares_kv: layer {layer} shares keys, but no layer before it has its own keys and the same window: "
        "set shares_kv to false"
    )


def kv_users(config: ConfigFields, layer: int) -> list[int]:
    """Return the later layers that use the keys and values of `layer`."""
    return [i for i in range(layer + 1, config.n_layers) if kv_source(config, i) == layer]


def check_shared_keys(config: ConfigFields) -> None:
    """Raise a UserError if no earlier layer has the keys and values that a layer shares, or if that layer has different
    sizes or positions."""
    for layer in range(config.n_layers):
        source = kv_source(config, layer)
        kinds = [(at(config.attention, i).heads(config)[1:], at(config.position, i)) for i in (source, layer)]
        if kinds[0] != kinds[1]:
            raise UserError(
                f"attention.shares_kv: layer {layer} uses the keys and values of layer {source}, which has other sizes "
                "or positions: give both the same n_kv_heads, d_head, d_value and position"
            )
