"""North Micro's text decoder: Command R7B whose config.json names the layers without positions (Cohere 2026)."""

from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, NoPosition, Rotary, SelfAttention, at
from onward.families import HF, cohere, llama, only, require, with_defaults
from onward.families._layers import FULL, LOCAL, layer_types, windowed_parts
from onward.families._rope import rope, rotary
from onward.families._rope_by_type import UNREAD

ARCHITECTURES = {"cohere_compass_text": "CohereCompassForCausalLM"}
SOURCE = "huggingface.co/CohereLabs/North-Micro-Vision-Instruct"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    only(hf, pooling=None)
    scale = hf.get("logit_scale")
    c = cohere.config(with_defaults(UNREAD | {"logit_scale": 1.0 if scale is None else scale}, hf))
    part = require(c.attention, SelfAttention)
    c = replace(c, attention=windowed_parts(hf, part, hf.get("sliding_window", 4096), [False] * c.n_layers))
    tables = hf.get("rope_parameters") or {}
    if missing := {*layer_types(c)["layer_types"]} - {*tables}:
        raise UserError(f"config.json has no rope_parameters.{min(missing)}: give a table, or null for no positions")
    of = {
        kind: NoPosition() if table is None else rotary({"rope_parameters": table}, context=c.context_length)
        for kind, table in tables.items()
    }
    return replace(c, position=tuple(of[kind] for kind in layer_types(c)["layer_types"]))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    layers = layer_types(c)
    tables: dict[str, Any] = {LOCAL: None, FULL: None}
    for layer, kind in enumerate(layers["layer_types"]):
        if isinstance(position := at(c.position, layer), Rotary):
            tables[kind] = rope(position)["rope_parameters"]
    keys = {key: value for key, value in cohere.to_hf(c).items() if not key.startswith("rope_")}
    return keys | layers | {"rope_parameters": tables}
