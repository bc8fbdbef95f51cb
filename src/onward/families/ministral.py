"""Ministral: Mistral with windows in some layers only (Mistral AI 2024)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, SelfAttention
from onward.families import HF, llama, mistral, require
from onward.families._layers import layer_types, windowed_parts

ARCHITECTURES = {"ministral": "MinistralForCausalLM"}
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    c = mistral.config(hf)
    part = replace(require(c.attention, SelfAttention), window=0)
    window = hf.get("sliding_window", 4096)
    return replace(c, attention=windowed_parts(hf, part, window, [window is not None] * c.n_layers))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | layer_types(c)
