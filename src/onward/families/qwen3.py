"""Qwen 3: Llama with queries and keys normalised per head (Yang et al. 2025)."""

from dataclasses import replace
from typing import Any

from onward.families import HF, llama, only, with_defaults
from onward.model.config import DecoderConfig, SelfAttention

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM"}
BASE = "model."
IGNORED = r""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = {
    "vocab_size": 151_936,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "intermediate_size": 22_016,
    "max_position_embeddings": 32_768,
}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    only(hf, use_sliding_window=False)
    c = llama.config(with_defaults(hf, DEFAULTS))
    bias = hf.get("attention_bias", False)
    return replace(c, attention=SelfAttention(qk_norm="head", bias=bias, out_bias=bias))


def to_hf(c: Any) -> dict[str, Any]:
    return llama.to_hf(c)
