"""CWM: Llama 3.1 with windows in three of four layers, trained on traces of programs (Meta 2025)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.families import HF, llama, require, with_defaults
from onward.families._layers import layer_types, windowed_parts
from onward.families.llama import shape, stretched

ARCHITECTURES = {"cwm": "CwmForCausalLM"}
SOURCE = "arXiv:2510.02387"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"cwm-32b": {}}
ANCESTORS = {"cwm": "llama-3.1-70b"}
SCALING = stretched(16.0)["rope_scaling"]
DEFAULTS = shape(6144, 21_504, 64, 48, 8) | {
    "vocab_size": 128_256,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):  # {} means no scaling
        given = with_defaults({"rope_scaling": SCALING}, given)
    c = llama.config(with_defaults({"attention_bias": False}, given))
    local = [layer % 4 > 0 for layer in range(c.n_layers)]
    return replace(c, attention=windowed_parts(hf, SelfAttention(), hf.get("sliding_window", 8192), local))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | layer_types(c) | {"mlp_bias": require(c.mlp, Gated).bias}
