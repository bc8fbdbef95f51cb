"""OLMo 3: OLMo 2 with windows in three of four layers, and YaRN in the others (OLMo et al. 2025)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Rotary, SelfAttention, at
from onward.families import HF, llama, olmo2, require, with_defaults
from onward.families._layers import FULL, LOCAL, layer_types, windowed_parts
from onward.families._rope_by_type import UNREAD, rope_by_type, rotary_by_type
from onward.families.llama import shape

ARCHITECTURES = {"olmo3": "Olmo3ForCausalLM"}
SOURCE = "arXiv:2512.13961"
BASE = "model."
IGNORED = ""
OLMO_3 = {
    "vocab_size": 100_278,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
PRESETS: dict[str, HF] = {"olmo-3-7b": OLMO_3, "olmo-3-32b": OLMO_3 | shape(5120, 27_648, 64, 40, 8)}
ANCESTORS = {"olmo-3": "olmo-2-7b", "olmo-3-32b": "olmo-2-32b"}
DEFAULTS = {"sliding_window": 4096}
THETA = 500_000.0
names = olmo2.names


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    old = {FULL: {"rope_theta": hf.get("rope_theta", THETA), "rope_scaling": hf.get("rope_scaling")}}
    c = olmo2.config(with_defaults(UNREAD, given))
    rotary = rotary_by_type(hf, {LOCAL: {"rope_theta": THETA}} | old, context=c.context_length)
    local = [layer % 4 < 3 for layer in range(c.n_layers)]
    c = replace(c, attention=windowed_parts(hf, require(c.attention, SelfAttention), given["sliding_window"], local))
    return replace(c, position=tuple(rotary[kind] for kind in layer_types(c)["layer_types"]))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    layers = layer_types(c)
    positions = rope_by_type(c, layers["layer_types"], dict.fromkeys((LOCAL, FULL), Rotary(THETA)))
    return llama.keys(c) | layers | positions | {"attention_bias": require(at(c.attention, 0), SelfAttention).bias}
