"""Mixtral: Mistral with eight experts in place of the feed-forward, two for each token (Jiang et al. 2024)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, Gated
from onward.families import HF, Row, llama, mistral, require, with_defaults
from onward.families._experts import experts
from onward.families.llama import shape

ARCHITECTURES = {"mixtral": "MixtralForCausalLM"}
SOURCE = "arXiv:2401.04088"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "mixtral-8x7b": {"max_position_embeddings": 32_768},
    "mixtral-8x22b": shape(6144, 16_384, 56, 48, 8) | {"max_position_embeddings": 65_536},
}
ANCESTORS = {"mixtral-8x7b": "mistral-7b", "mixtral-8x22b": "mixtral-8x7b"}
DEFAULTS = {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def config(hf: HF) -> DecoderConfig:
    c = mistral.uniform(with_defaults(hf, DEFAULTS))
    count = hf.get("num_experts", hf.get("num_local_experts", 8))
    return replace(c, mlp=Experts(count=count, top_k=hf.get("num_experts_per_tok", 2), act=require(c.mlp, Gated).act))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    mlp = require(c.mlp, Experts)
    return mistral.to_hf(c) | {"num_local_experts": mlp.count, "num_experts_per_tok": mlp.top_k}


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}.block_sparse_moe", f"blocks.{i}.mlp"
        yield f"{their}.gate.weight", f"{our}.router.weight"
        yield from experts(f"{their}.experts", our, require(c.mlp, Experts).count, ("w1", "w3", "w2"))
