"""AFM: Llama with a feed-forward without gate, and squared ReLU (Arcee AI 2025)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, Plain, SelfAttention
from onward.families import HF, llama, require, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"arcee": "ArceeForCausalLM"}
SOURCE = "huggingface.co/arcee-ai/AFM-4.5B"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "afm-4.5b": shape(2560, 18_432, 36, 20, 4)
    | {
        "vocab_size": 128_004,
        "head_dim": 128,
        "max_position_embeddings": 65_536,
        "rope_scaling": {"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096},
    }
}
ANCESTORS = {"afm": "llama-3.2-3b"}
DEFAULTS = {
    "hidden_size": 2560,
    "intermediate_size": 18_432,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "relu2",
}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    c = llama.config(with_defaults(hf, DEFAULTS))
    mlp = require(c.mlp, Gated)
    return replace(c, mlp=Plain(act=mlp.act, bias=mlp.bias))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    attention, mlp = require(c.attention, SelfAttention), require(c.mlp, Plain)
    return llama.keys(c) | {"attention_bias": attention.bias, "mlp_bias": mlp.bias}
