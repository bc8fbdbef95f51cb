"""OLMoE: Llama with 64 small experts, and norms over the full queries and keys, not per head (Muennighoff et al.
2024)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, Gated, SelfAttention
from onward.config.routing import SoftmaxRouting
from onward.families import HF, llama, only, qwen2_moe, require, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"olmoe": "OlmoeForCausalLM"}
SOURCE = "arXiv:2409.02060"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"olmoe-1b-7b": {"intermediate_size": 1024}}
ANCESTORS = {"olmoe": "mixtral-8x7b"}
DEFAULTS = shape(2048, 2048, 16, 16, 16) | {
    "num_key_value_heads": None,
    "vocab_size": 50_304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
names = qwen2_moe.names


def config(hf: HF) -> DecoderConfig:
    only(hf, clip_qkv=None)  # OLMoE clamps queries and keys after their norms, Onward before
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(given)
    experts = Experts(
        count=hf.get("num_local_experts", given["num_experts"]),
        top_k=given["num_experts_per_tok"],
        act=require(c.mlp, Gated).act,
        router=SoftmaxRouting(renormalize=hf.get("norm_topk_prob", False)),
    )
    return replace(c, attention=replace(require(c.attention, SelfAttention), qk_norm="width"), mlp=experts)


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    mlp = require(c.mlp, Experts)
    return llama.keys(c) | {
        "attention_bias": require(c.attention, SelfAttention).bias,
        "num_experts": mlp.count,
        "num_experts_per_tok": mlp.top_k,
        "norm_topk_prob": mlp.router.renormalize,
    }
