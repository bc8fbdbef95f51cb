"""Laguna: gated attention, a different number of heads in layers with windows, and many experts (Poolside 2026)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.config.attention_options import SoftplusGate
from onward.config.decoder import DecoderConfig, Experts, Gated, SelfAttention, at
from onward.config.routing import SigmoidRouting
from onward.families import HF, Row, linear, llama, only, require, with_defaults
from onward.families._experts import KINDS, dense_or_sparse, mixture_names
from onward.families._layers import FULL, LOCAL, windowed_layers
from onward.families._rope import rope, rotary, without_rope
from onward.families.llama import shape

ARCHITECTURES = {"laguna": "LagunaForCausalLM"}
SOURCE = "huggingface.co/poolside/Laguna-XS.2"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(2048, 8192, 40, 48, 8) | {
    "vocab_size": 100_352,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "moe_routed_scaling_factor": 1.0,
    "moe_router_logit_softcapping": 0.0,
}
WHOLE: HF = {"rope_parameters": {}, "rope_scaling": None, "partial_rotary_factor": 1.0}
ROPE = {FULL: {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5}, LOCAL: {"rope_theta": 10_000.0}}


def config(hf: HF) -> DecoderConfig:
    only(hf, moe_apply_router_weight_on_input=False)
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(with_defaults(WHOLE, given))
    heads = hf.get("num_attention_heads_per_layer") or [c.n_heads] * c.n_layers
    kinds = hf.get("mlp_layer_types") or [KINDS[layer > 0] for layer in range(c.n_layers)]
    if not len(heads) == len(kinds) == c.n_layers or not {*kinds} <= {*KINDS}:
        raise UserError(
            f"config.json has num_attention_heads_per_layer {heads} and mlp_layer_types {kinds}: Onward reads a number "
            f"of heads and one of {KINDS} for each layer"
        )
    near = windowed_layers(hf, [False] * c.n_layers)
    per_head = hf.get("gating", True) in (True, "per-head")
    part = replace(
        require(c.attention, SelfAttention), qk_norm="head", gate=SoftplusGate("head" if per_head else "element")
    )
    tables = hf.get("rope_parameters") or ROPE
    of = {kind: rotary({"rope_parameters": tables.get(kind)}, context=c.context_length) for kind in ROPE}
    plain = require(c.mlp, Gated)
    experts = Experts(
        count=given["num_experts"],
        top_k=given["num_experts_per_tok"],
        d_ff=given["moe_intermediate_size"],
        d_shared=given["shared_expert_intermediate_size"],
        router=SigmoidRouting(
            scale=given["moe_routed_scaling_factor"], softcap=given["moe_router_logit_softcapping"] or None
        ),
    )
    return replace(
        c,
        attention=tuple(
            replace(part, window=given["sliding_window"] * local, n_heads=count) for local, count in zip(near, heads)
        ),
        position=tuple(of[LOCAL if local else FULL] for local in near),
        mlp=tuple(experts if kind == KINDS[1] else plain for kind in kinds),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    parts = [require(at(c.attention, i), SelfAttention) for i in range(c.n_layers)]
    kinds = [LOCAL if part.window else FULL for part in parts]
    of = {kind: rope(at(c.position, i))["rope_parameters"] for i, kind in enumerate(kinds)}
    mlps = [at(c.mlp, i) for i in range(c.n_layers)]
    experts = next((part for part in mlps if isinstance(part, Experts)), Experts(router=SigmoidRouting()))
    return (
        without_rope(llama.keys(c))
        | dense_or_sparse(c)
        | {
            "layer_types": kinds,
            "sliding_window": max(part.window for part in parts) or DEFAULTS["sliding_window"],
            "rope_parameters": ROPE | of,
            "num_attention_heads_per_layer": [part.heads(c).n_heads for part in parts],
            "attention_bias": parts[0].bias,
            "gating": "per-head" if require(parts[0].gate, SoftplusGate).per == "head" else "per-element",
            "num_experts": experts.count,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.width(c),
            "shared_expert_intermediate_size": experts.d_shared,
            "moe_routed_scaling_factor": experts.router.scale,
            "moe_router_logit_softcapping": experts.router.softcap or 0.0,
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    yield from mixture_names(c, routing_bias="experts.e_score_correction_bias", shared="shared_expert")
    for i in range(c.n_layers):
        yield from linear(f"model.layers.{i}.self_attn.g_proj", f"blocks.{i}.attn.gate")
