"""Hy3: MiniMax M2 with a dense layer first, a shared expert, and norms of queries and keys per head (Tencent 2026)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.families import HF, Row, llama, only, renamed, require, with_defaults
from onward.families._experts import dense_or_sparse, mixture_keys, mixture_names, sigmoid_mixture
from onward.families.llama import shape

ARCHITECTURES = {"hy_v3": "HYV3ForCausalLM"}
SOURCE = "huggingface.co/tencent/Hy3-preview"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"hy3-295b": {}}
ANCESTORS = {"hy3": "minimax-m2"}
DEFAULTS = shape(4096, 13_312, 80, 64, 8) | {
    "vocab_size": 120_832,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11_158_840.0,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 192,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.826,
}
EXPERTS = {
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "router_scaling_factor": "routed_scaling_factor",
}


def config(hf: HF) -> DecoderConfig:
    only(hf, mlp_bias=False, norm_topk_prob=True, n_group=1, topk_group=1)
    hf.get("enable_moe_fp32_combine")  # affects rounding only
    given = with_defaults(renamed(hf, EXPERTS), DEFAULTS)
    c = llama.config(given)
    return replace(
        c,
        attention=replace(require(c.attention, SelfAttention), qk_norm="head"),
        mlp=sigmoid_mixture(given, require(c.mlp, Gated), c.n_layers),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    bias = require(c.attention, SelfAttention).bias
    return llama.keys(c) | dense_or_sparse(c) | mixture_keys(c, EXPERTS) | {"attention_bias": bias}


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    yield from mixture_names(c, router="router.gate", routing_bias="expert_bias", shared="shared_mlp")
