"""Layers of different types in a config.json, in both directions: their windows and their rotary positions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, Rotary, SelfAttention, at
from onward.families import HF, require
from onward.families._rope import named, rope, rotary

LOCAL, FULL = "sliding_attention", "full_attention"
UNREAD = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10_000.0}  # hides a family's own keys


def windowed_layers(hf: HF, default: Sequence[bool]) -> list[bool]:
    """Whether each layer attends to a sliding window, by `layer_types` or, without this key, `default`."""
    types = hf.get("layer_types") or [LOCAL if local else FULL for local in default]
    if len(types) != len(default) or not {*types} <= {LOCAL, FULL}:
        raise UserError(f"config.json has layer_types {types}: Onward reads {LOCAL} and {FULL}, one for each layer")
    return [kind == LOCAL for kind in types]


def windowed_parts(hf: HF, part: SelfAttention, window: int | None, local: Sequence[bool]) -> tuple[SelfAttention, ...]:
    """`part` in each layer, with a sliding window in those of `layer_types` or, without this key, `local`."""
    return tuple(replace(part, window=(window or 0) * is_local) for is_local in windowed_layers(hf, local))


def layer_types(c: DecoderConfig) -> dict[str, Any]:
    """The keys of a config.json for windows; the length of the windows only if a layer has one."""
    windows = [at(c.attention, layer).window for layer in range(c.n_layers)]
    length = {"sliding_window": max(windows)} if any(windows) else {}
    return {"layer_types": [LOCAL if window else FULL for window in windows], **length}


def rotary_by_type(hf: HF, old: Mapping[str, HF], *, context: int) -> dict[str, Rotary]:
    """The rotary positions of each type of layers, such as "sliding_attention", whose rope_parameters has a table for
    each. `old` maps the types to the keys of transformers before 5; a rope_scaling among them changes the table."""
    given = hf.get("rope_parameters") or {}
    if odd := [key for key in given if key not in old]:
        raise UserError(f"config.json has rope_parameters.{odd[0]}: give a table for each of {', '.join(old)}")
    tables = {kind: named(given.get(kind) or {}) | named(keys.get("rope_scaling") or {}) for kind, keys in old.items()}
    return {
        kind: rotary({**keys, "rope_parameters": tables[kind], "rope_scaling": None}, context=context)
        for kind, keys in old.items()
    }


def rope_by_type(c: DecoderConfig, types: Sequence[str], missing: Mapping[str, Rotary]) -> dict[str, Any]:
    """The keys of a config.json for rotary positions that depend on the type of a layer. `types` are those of the
    layers, `missing` the positions of types that no layer has."""
    of = {**missing} | {kind: require(at(c.position, layer), Rotary) for layer, kind in enumerate(types)}
    tables = {kind: rope(position)["rope_parameters"] for kind, position in of.items()}
    return {"rope_scaling": None} | rope(of[FULL]) | {"rope_parameters": tables}
