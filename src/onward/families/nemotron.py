"""Nemotron 4 and Minitron: relu ** 2, LayerNorms with weights around 1, half of each head rotated (NVIDIA 2024)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, LayerNorm, Plain, SelfAttention
from onward.families import HF, llama, require, with_defaults
from onward.families._rope import a_rotary
from onward.families.llama import shape

ARCHITECTURES = {"nemotron": "NemotronForCausalLM"}
SOURCE = "arXiv:2402.16819, arXiv:2407.14679"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "minitron-4b": shape(3072, 9216, 32, 24, 8) | {"head_dim": 128},
    "minitron-8b": shape(4096, 16_384, 32, 48, 8) | {"head_dim": 128},
    "nemotron-4-340b": shape(18_432, 73_728, 96, 96, 8),
}
ANCESTORS = {"nemotron-4": "palm-540b", "minitron": "nemotron-4-340b"}
DEFAULTS = shape(6144, 24_576, 32, 48, 48) | {
    "num_key_value_heads": None,
    "vocab_size": 256_000,
    "max_position_embeddings": 4096,
    "hidden_act": "relu2",
}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = llama.partly_rotated(given, fraction=0.5)
    mlp = require(c.mlp, Gated)
    return replace(
        c,
        mlp=Plain(act=mlp.act, bias=mlp.bias),
        norm=LayerNorm(eps=hf.get("norm_eps", 1e-5), offset=1.0),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | {
        "attention_bias": require(c.attention, SelfAttention).bias,
        "mlp_bias": require(c.mlp, Plain).bias,
        "partial_rotary_factor": a_rotary(c).fraction,
        "norm_eps": require(c.norm, LayerNorm).eps,
    }
