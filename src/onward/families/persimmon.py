"""Persimmon: GPT-NeoX with sequential branches, queries and keys normalized per head, and squared ReLU (Adept 2023)."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import DecoderConfig, LayerNorm, Plain, SelfAttention
from onward.families import ACTIVATIONS, HF, Row, activation, gpt_neox, linear, require, sizes
from onward.families._rope import a_rotary, rope, rotary
from onward.families.bloom import fused_by_group

ARCHITECTURES = {"persimmon": "PersimmonForCausalLM"}
SOURCE = "huggingface.co/adept/persimmon-8b-base"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"persimmon-8b": {"rope_theta": 25_000.0}}
ANCESTORS = {"persimmon": "gpt-neox-20b"}
SIZES = {our: (their, default) for our, (their, default) in gpt_neox.SIZES.items()} | {
    "vocab_size": ("vocab_size", 262_144),
    "d_model": ("hidden_size", 4096),
    "n_layers": ("num_hidden_layers", 36),
    "d_ff": ("intermediate_size", 16_384),
    "context_length": ("max_position_embeddings", 16_384),
}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.dense": "attn.out",
    "self_attn.q_layernorm": "attn.q_norm",
    "self_attn.k_layernorm": "attn.k_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}


def config(hf: HF) -> DecoderConfig:
    act: Any = hf.get("hidden_act", "relu2")
    return DecoderConfig(
        **sizes(hf, SIZES),
        position=rotary(hf, context=hf.get("max_position_embeddings", 16_384), fraction=0.5),
        attention=SelfAttention(qk_norm="head" if hf.get("qk_layernorm", True) else "none", bias=True, out_bias=True),
        mlp=Plain(act=ACTIVATIONS.get(act, act), bias=True),
        norm=LayerNorm(eps=hf.get("layer_norm_eps", 1e-5)),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        **rope(c.position),
        "partial_rotary_factor": a_rotary(c).fraction,
        "attention_dropout": c.dropout,
        "qk_layernorm": require(c.attention, SelfAttention).qk_norm == "head",
        "hidden_act": activation(c.mlp),
        "layer_norm_eps": require(c.norm, LayerNorm).eps,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "model.embed_tokens.weight", "embed.weight"
    yield from linear("model.final_layernorm", "norm")
    yield "lm_head.weight", "head.weight"
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}", f"blocks.{i}"
        yield from linear(f"{their}.self_attn.query_key_value", [f"{our}.attn.{n}" for n in "qkv"], fused_by_group(c))
        for part, ours in LAYER.items():
            yield from linear(f"{their}.{part}", f"{our}.{ours}")
