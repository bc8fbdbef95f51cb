"""Qwen 3: Qwen 2 with queries and keys normalized per head instead of biases (Yang et al. 2025)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention, at
from onward.families import HF, llama, qwen2, require, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM"}
SOURCE = "arXiv:2505.09388"
BASE = "model."
IGNORED = ""
LONG = {"max_position_embeddings": 40_960, "rope_theta": 1e6}
SMALL = LONG | {"tie_word_embeddings": True}
PRESETS: dict[str, HF] = {
    "qwen3-0.6b": SMALL | shape(1024, 3072, 28, 16, 8),
    "qwen3-1.7b": SMALL | shape(2048, 6144, 28, 16, 8),
    "qwen3-4b": SMALL | shape(2560, 9728, 36, 32, 8),
    "qwen3-8b": LONG | shape(4096, 12_288, 36, 32, 8),
    "qwen3-14b": LONG | shape(5120, 17_408, 40, 40, 8),
    "qwen3-32b": LONG | shape(5120, 25_600, 64, 64, 8),
}
ANCESTORS = {"qwen3": "qwen2.5-7b"}
DEFAULTS = qwen2.DEFAULTS | {"head_dim": 128}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    c = llama.config(with_defaults(hf, DEFAULTS))
    part = replace(require(c.attention, SelfAttention), qk_norm="head")
    return replace(c, attention=qwen2.windowed(hf, part, c.n_layers), mlp=Gated(act=require(c.mlp, Gated).act))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return qwen2.to_hf(c) | {"attention_bias": require(at(c.attention, 0), SelfAttention).bias}
