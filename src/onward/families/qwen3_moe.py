"""Qwen 3 MoE: Qwen 3 with many small experts, none of them shared (Yang et al. 2025)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.families import HF, llama, qwen2_moe, require, with_defaults
from onward.families.llama import shape
from onward.families.qwen3 import LONG

ARCHITECTURES = {"qwen3_moe": "Qwen3MoeForCausalLM"}
SOURCE = "arXiv:2505.09388"
BASE = "model."
IGNORED = ""
BOTH = LONG | {"head_dim": 128, "norm_topk_prob": True}
PRESETS: dict[str, HF] = {
    "qwen3-30b-a3b": BOTH | shape(2048, 6144, 48, 32, 4),
    "qwen3-235b-a22b": BOTH | shape(4096, 12_288, 94, 64, 4) | {"moe_intermediate_size": 1536},
}
ANCESTORS = {"qwen3": "qwen3-8b"}
DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
names = qwen2_moe.names


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    count = hf.get("num_local_experts", given["num_experts"])  # the key that transformers 5 saves
    given = with_defaults({"num_experts": count}, given)
    c = llama.config(given)
    size = hf.get("sliding_window", 4096) or 0
    window = size if hf.get("use_sliding_window", False) else 0
    attention = replace(require(c.attention, SelfAttention), qk_norm="head", window=window)
    c = replace(c, attention=attention, mlp=Gated(act=require(c.mlp, Gated).act))
    return replace(c, mlp=qwen2_moe.sparse(given, c))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    (_, keys), attention = qwen2_moe.sparse_keys(c), require(c.attention, SelfAttention)
    return (
        llama.keys(c)
        | keys
        | {
            "num_local_experts": keys["num_experts"],
            "attention_bias": attention.bias,
            "sliding_window": attention.window or None,
            "use_sliding_window": attention.window > 0,
        }
    )
