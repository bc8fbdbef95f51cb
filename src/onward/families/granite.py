"""Granite: Llama with multipliers for embeddings, scores, residual additions and logits (IBM 2024)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, PreNorm, SelfAttention, at
from onward.families import HF, llama, require
from onward.families.llama import shape

ARCHITECTURES = {"granite": "GraniteForCausalLM"}
SOURCE = "huggingface.co/ibm-granite/granite-3.0-8b-base"
BASE = "model."
IGNORED = ""
BOTH = {
    "vocab_size": 49_152,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_dropout": 0.1,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
}
B2 = BOTH | shape(2048, 8192, 40, 32, 8) | {"attention_multiplier": 1 / 64, "logits_scaling": 8.0}
B8 = BOTH | shape(4096, 12_800, 40, 32, 8) | {"attention_multiplier": 1 / 128, "logits_scaling": 16.0}
PRESETS: dict[str, HF] = {
    "granite-3.0-2b": B2,
    "granite-3.0-8b": B8,
    "granite-3.1-2b": B2 | {"max_position_embeddings": 131_072, "rope_theta": 5e6},
    "granite-3.1-8b": B8 | {"max_position_embeddings": 131_072, "rope_theta": 1e7},
}
ANCESTORS = {"granite-3.0": "llama-2-7b", "granite-3.1-2b": "granite-3.0-2b", "granite-3.1-8b": "granite-3.0-8b"}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    c = llama.config(hf)
    scale = hf.get("attention_multiplier", 1.0)
    return replace(
        c,
        attention=replace(require(c.attention, SelfAttention), scale=None if scale == c.d_head**-0.5 else scale),
        block=PreNorm(residual_scale=hf.get("residual_multiplier", 1.0)),
        embed_scale=hf.get("embedding_multiplier", 1.0),
        logit_scale=1 / hf.get("logits_scaling", 1.0),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.to_hf(c) | keys(c)


def keys(c: DecoderConfig) -> dict[str, Any]:
    """Return the keys that Granite shares with Granite MoE."""
    attention = require(at(c.attention, 0), SelfAttention)
    scale = attention.scale
    return llama.keys(c) | {
        "attention_bias": attention.bias,
        "attention_multiplier": c.d_head**-0.5 if scale is None else scale,
        "residual_multiplier": require(c.block, PreNorm).residual_scale,
        "embedding_multiplier": c.embed_scale,
        "logits_scaling": 1 / c.logit_scale,
    }
