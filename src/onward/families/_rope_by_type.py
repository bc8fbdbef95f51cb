"""Rotary positions that depend on the type of a layer, such as "sliding_attention", in a config.json, in both
directions."""

from collections.abc import Mapping, Sequence
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, Rotary, at
from onward.families import HF, require
from onward.families._layers import FULL
from onward.families._rope import rope, rotary

UNREAD = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10_000.0}  # replaces a family's own keys


def rotary_by_type(hf: HF, old: Mapping[str, HF], *, context: int) -> dict[str, Rotary]:
    """Return the rotary positions of each type of layers, such as "sliding_attention". rope_parameters has a table for
    each type. `old` maps the types to keys of transformers before 5, whose rope_scaling overrides entries of the
    table."""
    given = hf.get("rope_parameters") or {}
    if odd := [key for key in given if key not in old]:
        raise UserError(f"config.json has rope_parameters.{odd[0]}: give a table for each of {', '.join(old)}")
    tables = {kind: named(given.get(kind) or {}) | named(keys.get("rope_scaling") or {}) for kind, keys in old.items()}
    return {
        kind: rotary({**keys, "rope_scaling": None, "rope_parameters": tables[kind]}, context=context)
        for kind, keys in old.items()
    }


def named(table: HF) -> dict[str, Any]:
    """Return a table of rotary positions with its kind under the name of transformers 5, rope_type instead of type."""
    return ({"rope_type": table["type"]} if "type" in table else {}) | dict(table)


def rope_by_type(c: DecoderConfig, types: Sequence[str], missing: Mapping[str, Rotary]) -> dict[str, Any]:
    """The keys of a config.json for rotary positions that depend on the type of a layer. `types` are the types of the
    layers, `missing` the positions of types that no layer has."""
    of = {**missing} | {kind: require(at(c.position, layer), Rotary) for layer, kind in enumerate(types)}
    tables = {kind: rope(position)["rope_parameters"] for kind, position in of.items()}
    return {"rope_scaling": None} | rope(of[FULL]) | {"rope_parameters": tables}
