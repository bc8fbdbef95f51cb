"""Kolibri: EXAONE 4's windows and positions, norms around branches, and routing biases on logits (Aleph Alpha 2026)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, Gated, NoPosition, Rotary, Sandwich, SelfAttention, at
from onward.config.routing import SigmoidRouting
from onward.families import HF, Row, linear, llama, require, with_defaults
from onward.families._experts import mixture_names
from onward.families._layers import layer_types, windowed_parts
from onward.families._rope import a_rotary

ARCHITECTURES = {"kolibri1": "Kolibri1ForCausalLM"}
SOURCE = "huggingface.co/Aleph-Alpha/Kolibri-1"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = {
    "hidden_size": 2560,
    "num_hidden_layers": 50,
    "num_attention_heads": 48,
    "num_key_value_heads": 4,
    "vocab_size": 128_000,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "sliding_window": 513,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 6,
}


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    width = given["moe_intermediate_size"]
    c = llama.config(with_defaults({"intermediate_size": width, "attention_bias": False, "mlp_bias": False}, given))
    local = [(layer + 1) % 5 != 0 for layer in range(c.n_layers)]
    attention = windowed_parts(given, SelfAttention(qk_norm="head"), given["sliding_window"], local)
    experts = Experts(
        count=hf.get("num_local_experts", hf.get("num_experts", 384)),
        top_k=given["num_experts_per_tok"],
        d_shared=given["shared_expert_intermediate_size"],
        act=require(c.mlp, Gated).act,
        router=SigmoidRouting(renormalize=hf.get("norm_topk_prob", False), bias_on="logits"),
    )
    everywhere = given["sliding_window"] is None
    return replace(
        c,
        attention=attention,
        position=tuple(a_rotary(c) if part.window or everywhere else NoPosition() for part in attention),
        block=Sandwich(),
        mlp=experts,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    mlp, layers = require(c.mlp, Experts), layer_types(c)
    everywhere = "sliding_window" not in layers and isinstance(at(c.position, 0), Rotary)
    keys = llama.keys(replace(c, position=a_rotary(c)))
    del keys["intermediate_size"]
    return (
        keys
        | layers
        | ({"sliding_window": None} if everywhere else {})
        | {
            "moe_intermediate_size": c.d_ff,
            "num_experts": mlp.count,
            "num_experts_per_tok": mlp.top_k,
            "norm_topk_prob": mlp.router.renormalize,
            "shared_expert_intermediate_size": mlp.d_shared,
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, our, *_ in (*llama.names(c), *mixture_names(c, routing_bias="gate.expert_bias")):
        yield their.replace("mlp.gate.expert", "moe.router.expert") if isinstance(their, str) else their, our
    for i in range(c.n_layers):
        for their, our in ("post_attn_norm", "attn_post_norm"), ("post_ffn_norm", "mlp_post_norm"):
            yield from linear(f"model.layers.{i}.{their}", f"blocks.{i}.{our}")
