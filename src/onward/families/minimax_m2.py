"""MiniMax M2: Mixtral with 256 experts, DeepSeek-V3's router, and norms over the full queries and keys, not per head
(MiniMax 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, Gated, SelfAttention
from onward.config.routing import SigmoidRouting
from onward.families import HF, Row, llama, mixtral, only, require, with_defaults
from onward.families._rope import a_rotary
from onward.families.llama import shape

ARCHITECTURES = {"minimax_m2": "MiniMaxM2ForCausalLM"}
SOURCE = "huggingface.co/MiniMaxAI/MiniMax-M2"
BASE = "model."
IGNORED = ""
M2 = {"rotary_dim": 64}
PRESETS: dict[str, HF] = {"minimax-m2": M2, "minimax-m2.1": M2}
ANCESTORS = {"minimax-m2": "mixtral-8x7b", "minimax-m2.1": "minimax-m2"}
DEFAULTS = shape(3072, 1536, 62, 48, 8) | {
    "vocab_size": 200_064,
    "head_dim": 128,
    "max_position_embeddings": 196_608,
    "rope_theta": 5e6,
}


def config(hf: HF) -> DecoderConfig:
    only(hf, scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer")
    given = with_defaults(hf, DEFAULTS)
    rotary_dim = hf.get("rotary_dim")
    c = llama.partly_rotated(given, 1.0 if rotary_dim is None else rotary_dim / given["head_dim"])
    only(hf, shared_intermediate_size=0, attn_type_list=[1] * c.n_layers)
    experts = Experts(
        count=hf.get("num_local_experts", hf.get("num_experts", 256)),
        top_k=hf.get("num_experts_per_tok", 8),
        act=require(c.mlp, Gated).act,
        router=SigmoidRouting(),
    )
    return replace(c, attention=SelfAttention(qk_norm="width"), mlp=experts)


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    mlp, rotary = require(c.mlp, Experts), a_rotary(c)
    return llama.keys(c) | {
        "rotary_dim": rotary.rope_dim(c.d_head),
        "num_local_experts": mlp.count,
        "num_experts_per_tok": mlp.top_k,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from mixtral.names(c)
    for i in range(c.n_layers):
        their = f"model.layers.{i}.block_sparse_moe.e_score_correction_bias"
        yield their, f"blocks.{i}.mlp.router.routing_bias"
