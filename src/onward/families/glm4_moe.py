"""GLM 4.5 to 4.7: DeepSeek-V3's experts with grouped heads, half of each rotated, and biases of q, k, v (Z.ai 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.families import HF, Row, llama, require, with_defaults
from onward.families._experts import mixture_keys, mixture_names, sigmoid_mixture
from onward.families._prediction import NUMBERED
from onward.families._rope import a_rotary
from onward.families.llama import shape

ARCHITECTURES = {"glm4_moe": "Glm4MoeForCausalLM"}
SOURCE = "arXiv:2508.06471"
BASE = "model."
IGNORED = ""
PREDICTION = NUMBERED
AIR = {"head_dim": 128, "attention_bias": True, "rope_theta": 1e6}
GLM_45 = (
    AIR
    | shape(5120, 12_288, 92, 96, 8)
    | {
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    }
)
LONG = GLM_45 | {"max_position_embeddings": 202_752}
PRESETS: dict[str, HF] = {"glm-4.5": GLM_45, "glm-4.5-air": AIR, "glm-4.6": LONG, "glm-4.7": LONG}
ANCESTORS = {"glm-4.5": "deepseek-v3", "glm-4.5-air": "glm-4.5", "glm-4.6": "glm-4.5", "glm-4.7": "glm-4.6"}
DEFAULTS = shape(4096, 10_944, 46, 96, 8) | {
    "vocab_size": 151_552,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
}


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    head = given["hidden_size"] // given["num_attention_heads"]  # rounded down, as in the default of transformers
    c = llama.partly_rotated(with_defaults(given, {"head_dim": head}), fraction=0.5)
    norm, bias = hf.get("use_qk_norm", False), hf.get("attention_bias", False)
    return replace(
        c,
        attention=SelfAttention(qk_norm="head" if norm else "none", bias=bias),
        mlp=sigmoid_mixture(given, require(c.mlp, Gated), c.n_layers),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    attention = require(c.attention, SelfAttention)
    return (
        llama.keys(c)
        | mixture_keys(c)
        | {
            "partial_rotary_factor": a_rotary(c).fraction,
            "attention_bias": attention.bias,
            "use_qk_norm": attention.qk_norm == "head",
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    yield from mixture_names(c)
