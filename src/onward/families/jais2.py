"""Jais 2: AFM with LayerNorm and all biases, for Arabic (Inception 2025)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, LayerNorm
from onward.families import HF, arcee, require, with_defaults

ARCHITECTURES = {"jais2": "Jais2ForCausalLM"}
SOURCE = "huggingface.co/inceptionai/Jais-2-8B-Chat"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = {
    "vocab_size": 150_272,
    "hidden_size": 3328,
    "intermediate_size": 26_624,
    "num_attention_heads": 26,
    "max_position_embeddings": 8192,
    "attention_bias": True,
    "mlp_bias": True,
}
names = arcee.names


def config(hf: HF) -> DecoderConfig:
    return replace(arcee.config(with_defaults(hf, DEFAULTS)), norm=LayerNorm(eps=hf.get("layer_norm_eps", 1e-5)))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return arcee.to_hf(c) | {"layer_norm_eps": require(c.norm, LayerNorm).eps}
