"""Mellum 2: Qwen 3 MoE with windows, and a rotary base for each type of layer (JetBrains 2026)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, RMSNorm, Rotary, SelfAttention, at
from onward.families import HF, activation, llama, qwen2_moe, require, with_defaults
from onward.families._experts import KINDS, dense_or_sparse
from onward.families._layers import FULL, LOCAL, layer_types, windowed_parts
from onward.families._rope_by_type import UNREAD, rope_by_type, rotary_by_type
from onward.families.llama import shape

ARCHITECTURES = {"mellum": "MellumForCausalLM"}
SOURCE = "huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(2304, 7168, 28, 32, 4) | {
    "vocab_size": 98_304,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": 896,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
THETAS = {LOCAL: 10_000.0, FULL: 500_000.0}
names = qwen2_moe.names


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(with_defaults(UNREAD, given))
    part = replace(require(c.attention, SelfAttention), qk_norm="head")
    parts = windowed_parts(hf, part, hf.get("sliding_window", 1024), [False] * c.n_layers)
    c = replace(c, attention=parts, mlp=Gated(act=require(c.mlp, Gated).act))
    of = rotary_by_type(hf, {kind: {"rope_theta": theta} for kind, theta in THETAS.items()}, context=c.context_length)
    experts = {
        "num_experts": hf.get("num_local_experts", given["num_experts"]),
        "mlp_only_layers": [i for i, kind in enumerate(hf.get("mlp_layer_types") or ()) if kind == KINDS[0]],
    }
    return replace(
        c,
        position=tuple(of[kind] for kind in layer_types(c)["layer_types"]),
        mlp=qwen2_moe.sparse(with_defaults(experts, given), c),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    (_, experts), layers = qwen2_moe.sparse_keys(c), layer_types(c)
    positions = rope_by_type(c, layers["layer_types"], {kind: Rotary(theta) for kind, theta in THETAS.items()})
    return (
        {their: getattr(c, our) for our, (their, _) in llama.SIZES.items()}
        | layers
        | dense_or_sparse(c)
        | {
            "rope_parameters": positions["rope_parameters"],
            "num_local_experts": experts["num_experts"],
            "num_experts_per_tok": experts["num_experts_per_tok"],
            "moe_intermediate_size": experts["moe_intermediate_size"],
            "norm_topk_prob": experts["norm_topk_prob"],
            "attention_bias": require(at(c.attention, 0), SelfAttention).bias,
            "hidden_act": activation(at(c.mlp, 0)),
            "rms_norm_eps": require(c.norm, RMSNorm).eps,
        }
    )
