"""Trinity: norms before and after branches, gated attention, no positions in layers without windows (Arcee AI 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.attention_options import SigmoidGate
from onward.config.decoder import DecoderConfig, Gated, NoPosition, Sandwich, SelfAttention, at
from onward.families import HF, Row, linear, llama, renamed, require, with_defaults
from onward.families._experts import mixture_keys, mixture_names, sigmoid_mixture
from onward.families._layers import layer_types, windowed_parts
from onward.families._rope import a_rotary
from onward.families.llama import shape

ARCHITECTURES = {"afmoe": "AfmoeForCausalLM"}
SOURCE = "huggingface.co/arcee-ai/Trinity-Mini, arXiv:2602.17004"
BASE = "model."
IGNORED = ""
RELEASED = {"mup_enabled": True, "sliding_window": 2048, "max_position_embeddings": 131_072}
MINI = {"moe_intermediate_size": 1024, "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1}
PRESETS: dict[str, HF] = {
    "trinity-nano-6b": RELEASED
    | MINI
    | shape(1024, 3072, 56, 8, 2)
    | {"moe_intermediate_size": 256, "num_dense_layers": 2, "route_scale": 2.448},
    "trinity-mini-26b": RELEASED | MINI | shape(2048, 6144, 32, 32, 4) | {"num_dense_layers": 2, "route_scale": 2.826},
}
ANCESTORS = {"trinity": "qwen3-8b"}
KEYS = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_dense_layers": "first_k_dense_replace",
    "route_scale": "routed_scaling_factor",
}
DEFAULTS = shape(2048, 6144, 32, 16, 16) | {
    "num_key_value_heads": None,
    "vocab_size": 200_192,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 6,
    "num_experts": 64,
    "num_shared_experts": 2,
    "num_dense_layers": 1,
}


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(given)
    every = hf.get("global_attn_every_n_layers", 4)
    part = replace(require(c.attention, SelfAttention), qk_norm="head", gate=SigmoidGate())
    local = [(i + 1) % every > 0 for i in range(c.n_layers)]
    parts = windowed_parts(hf, part, hf.get("sliding_window", 1024), local)
    return replace(
        c,
        attention=parts,
        position=tuple(a_rotary(c) if part.window else NoPosition() for part in parts),
        mlp=sigmoid_mixture(renamed(given, KEYS), require(c.mlp, Gated), c.n_layers),
        block=Sandwich(),
        embed_scale=c.d_model**0.5 if hf.get("mup_enabled", False) else 1.0,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    bias = require(at(c.attention, 0), SelfAttention).bias
    own = {"attention_bias": bias, "mup_enabled": c.embed_scale != 1.0}
    return llama.keys(replace(c, position=a_rotary(c))) | layer_types(c) | mixture_keys(c, KEYS) | own


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, our, *_ in llama.names(c):
        yield str(their).replace("post_attention_layernorm", "pre_mlp_layernorm"), our
    yield from mixture_names(c, router="router.gate", routing_bias="expert_bias")
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}", f"blocks.{i}"
        yield from linear(f"{their}.self_attn.gate_proj", f"{our}.attn.gate")
        yield from linear(f"{their}.post_attention_layernorm", f"{our}.attn_post_norm")
        yield from linear(f"{their}.post_mlp_layernorm", f"{our}.mlp_post_norm")
