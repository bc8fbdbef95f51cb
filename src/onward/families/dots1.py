"""dots.llm1: Qwen 3 without grouped queries, and with DeepSeek-V3's experts (Huo et al. 2025)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention, at
from onward.families import HF, glm4_moe, llama, require, with_defaults
from onward.families._experts import mixture_keys, sigmoid_mixture
from onward.families._layers import layer_types, windowed_parts
from onward.families.llama import shape

ARCHITECTURES = {"dots1": "Dots1ForCausalLM"}
SOURCE = "arXiv:2506.05767"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "dots.llm1": {
        "hidden_size": 4096,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e7,
        "sliding_window": None,
    }
}
ANCESTORS = {"dots": "deepseek-v3"}
DEFAULTS = shape(4608, 10_944, 62, 32, 32) | {
    "vocab_size": 152_064,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
}
names = glm4_moe.names


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(given)
    part = replace(require(c.attention, SelfAttention), qk_norm="head")
    local = [layer >= hf.get("max_window_layers", 62) for layer in range(c.n_layers)]
    return replace(
        c,
        attention=windowed_parts(hf, part, hf.get("sliding_window", 4096), local),
        mlp=sigmoid_mixture(given, require(c.mlp, Gated), c.n_layers),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    bias = require(at(c.attention, 0), SelfAttention).bias
    return llama.keys(c) | layer_types(c) | mixture_keys(c) | {"attention_bias": bias}
