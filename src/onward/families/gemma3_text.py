"""Gemma 3: Gemma 2 with q/k norms in place of caps, and five local layers per global layer (Gemma Team 2025)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Rotary
from onward.families import HF, gemma2, only, with_defaults
from onward.families._layers import FULL, LOCAL, layer_types
from onward.families._rope_by_type import UNREAD, rope_by_type, rotary_by_type
from onward.families.llama import shape

ARCHITECTURES = {"gemma3_text": "Gemma3ForCausalLM"}
SOURCE = "arXiv:2503.19786"
BASE = "model."
IGNORED = ""
SMALL = {"vocab_size": 262_144, "max_position_embeddings": 32_768, "sliding_window": 512}
LARGE = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
PRESETS: dict[str, HF] = {
    "gemma-3-270m": SMALL | shape(640, 2048, 18, 4, 1),
    "gemma-3-1b": SMALL | shape(1152, 6912, 26, 4, 1),
    "gemma-3-4b": LARGE | shape(2560, 10_240, 34, 8, 4),
    "gemma-3-12b": LARGE | shape(3840, 15_360, 48, 16, 8),
    "gemma-3-27b": LARGE | shape(5376, 21_504, 62, 32, 16) | {"head_dim": 128, "query_pre_attn_scalar": 168},
}
ANCESTORS = {"gemma-3": "gemma-2-2b", "gemma-3-12b": "gemma-2-9b", "gemma-3-27b": "gemma-2-27b"}
DEFAULTS = gemma2.DEFAULTS | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
names = gemma2.names


def config(hf: HF) -> DecoderConfig:
    only(hf, attn_logit_softcapping=None)
    c = gemma2.layered(
        with_defaults(UNREAD, with_defaults(hf, DEFAULTS)), hf.get("sliding_window_pattern", 6), qk_norm="head"
    )
    old: dict[str, dict[str, Any]] = {
        LOCAL: {"rope_theta": hf.get("rope_local_base_freq", 10_000.0)},
        FULL: {"rope_theta": hf.get("rope_theta", 1_000_000.0), "rope_scaling": hf.get("rope_scaling")},
    }
    of = rotary_by_type(hf, old, context=c.context_length)
    return replace(c, position=tuple(of[kind] for kind in layer_types(c)["layer_types"]))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    hf = gemma2.to_hf(c)
    keys = rope_by_type(c, hf["layer_types"], {LOCAL: Rotary(), FULL: Rotary(theta=1_000_000.0)})
    return hf | keys | {"rope_local_base_freq": keys["rope_parameters"][LOCAL]["rope_theta"]}
