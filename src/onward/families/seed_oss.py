"""Seed-OSS: Llama with biases of queries, keys and values, and a head width independent of the model's width (ByteDance
2025)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.families import HF, llama, require, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"seed_oss": "SeedOssForCausalLM"}
SOURCE = "huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"seed-oss-36b": {"hidden_size": 5120, "rope_theta": 1e7}}
ANCESTORS = {"seed-oss": "llama-3-70b"}
DEFAULTS = shape(4096, 27_648, 64, 80, 8) | {
    "vocab_size": 155_136,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
    "attention_dropout": 0.1,
}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    bias, out_bias = hf.get("attention_bias", True), hf.get("attention_out_bias", False)
    return replace(llama.config(with_defaults(hf, DEFAULTS)), attention=SelfAttention(bias=bias, out_bias=out_bias))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    attention = require(c.attention, SelfAttention)
    return llama.keys(c) | {
        "residual_dropout": c.dropout,
        "attention_bias": attention.bias,
        "attention_out_bias": attention.out_bias,
        "mlp_bias": require(c.mlp, Gated).bias,
    }
