"""K-EXAONE: EXAONE 4 with norms before the branches and DeepSeek-V3's experts (LG 2026)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated
from onward.families import HF, Inexpressible, Row, exaone4, llama, renamed, require, with_defaults
from onward.families._experts import dense_or_sparse, mixture_keys, mixture_names, sigmoid_mixture
from onward.families.llama import shape

ARCHITECTURES = {"exaone_moe": "ExaoneMoeForCausalLM"}
SOURCE = "arXiv:2601.01739"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "k-exaone-236b": shape(6144, 18_432, 48, 64, 8)
    | {
        "vocab_size": 153_600,
        "head_dim": 128,
        "moe_intermediate_size": 2048,
        "num_experts": 128,
        "sliding_window": 128,
        "max_position_embeddings": 262_144,
        "rope_theta": 1e6,
    }
}
ANCESTORS = {"k-exaone": "exaone-4.0-32b"}
DEFAULTS = {
    "moe_intermediate_size": 1024,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
EXPERTS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


def config(hf: HF) -> DecoderConfig:
    c = exaone4.pre_norm(hf)
    given = with_defaults(renamed(hf, EXPERTS), DEFAULTS)
    return replace(c, mlp=sigmoid_mixture(given, require(c.mlp, Gated), c.n_layers))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    keys = exaone4.to_hf(c)
    if keys.get("sliding_window", 0) is None:
        raise Inexpressible("K-EXAONE rotates queries and keys in layers with windows only")
    return keys | dense_or_sparse(c) | mixture_keys(c, EXPERTS)


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    yield from mixture_names(c, routing_bias="e_score_correction_bias")
