"""Solar Open: GLM 4.5 with experts in every layer and fully rotated heads (Upstage 2026)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.families import HF, glm4_moe, llama, only, require, with_defaults
from onward.families._experts import mixture_keys, sigmoid_mixture

ARCHITECTURES = {"solar_open": "SolarOpenForCausalLM"}
SOURCE = "arXiv:2601.07022"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"solar-open-100b": {}}
ANCESTORS = {"solar-open": "glm-4.5-air"}
DEFAULTS = {
    "vocab_size": 196_608,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "moe_intermediate_size": 1280,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
}
names = glm4_moe.names


def config(hf: HF) -> DecoderConfig:
    only(hf, use_qk_norm=False, first_k_dense_replace=0)
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(given)
    attention = replace(require(c.attention, SelfAttention), out_bias=False)
    return replace(c, attention=attention, mlp=sigmoid_mixture(given, require(c.mlp, Gated), c.n_layers))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | mixture_keys(c) | {"attention_bias": require(c.attention, SelfAttention).bias}
