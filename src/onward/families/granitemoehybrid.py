"""Granite 4: Granite with Mamba-2 in most layers, with or without experts, and often without positions (IBM 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, Gated, Mamba2, NoPosition, PreNorm, RMSNorm, SelfAttention, at
from onward.families import HF, Row, granite, granitemoe, linear, require, with_defaults
from onward.families._layers import FULL
from onward.families._recurrent import LINEAR, layers, mamba2, mamba2_keys, mamba2_names, one, types, without_attention
from onward.families._rope import a_rotary
from onward.families.llama import shape

ARCHITECTURES = {"granitemoehybrid": "GraniteMoeHybridForCausalLM"}
SOURCE = "huggingface.co/ibm-granite/granite-4.0-h-tiny"
BASE = "model."
IGNORED = ""
BOTH = {
    "vocab_size": 100_352,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "position_embedding_type": "nope",
    "embedding_multiplier": 12.0,
    "mamba_d_state": 128,
    "layer_types": [FULL if i % 10 == 5 else LINEAR for i in range(40)],
}
TINY = BOTH | shape(1536, 512, 40, 12, 4) | {"attention_multiplier": 1 / 128, "residual_multiplier": 0.22}
SMALL = BOTH | shape(4096, 768, 40, 32, 8) | {"attention_multiplier": 1 / 128, "residual_multiplier": 0.22}
PRESETS: dict[str, HF] = {
    "granite-4.0-h-tiny": TINY
    | {
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 48,
        "logits_scaling": 6.0,
    },
    "granite-4.0-h-small": SMALL
    | {
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "shared_intermediate_size": 1536,
        "logits_scaling": 16.0,
    },
}
ANCESTORS = {"granite-4.0-h": "granite-3.0-1b-a400m", "granite-4.0-h-small": "granite-4.0-h-tiny"}
DEFAULTS = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4}
DEFAULTS |= {"hidden_size": 4096}
OLD = {"attention": FULL, "mamba": LINEAR}


def config(hf: HF) -> DecoderConfig:
    given, kinds = with_defaults(hf, DEFAULTS), hf.get("layer_types") or hf.get("layers_block_type")
    renamed = {"layer_types": [OLD.get(kind, kind) for kind in kinds or ()]}
    c = granite.config(with_defaults({"mlp_bias": False}, hf))
    mamba = mamba2(given, require(c.norm, RMSNorm).eps)
    parts = {FULL: require(c.attention, SelfAttention), LINEAR: mamba}
    act, shared = require(c.mlp, Gated).act, hf.get("shared_intermediate_size", 1024)
    count, top_k = hf.get("num_local_experts", 8), hf.get("num_experts_per_tok", 2)
    return replace(
        c,
        attention=layers(renamed, c.n_layers, [LINEAR] * c.n_layers, parts),
        position=c.position if hf.get("position_embedding_type") == "rope" else NoPosition(),
        mlp=Experts(count, top_k, d_shared=shared, act=act) if count else Gated(act, d_ff=shared),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    require(c.block, PreNorm)
    mlp, attention = require(at(c.mlp, 0), Experts, Gated), one(c, SelfAttention, SelfAttention())
    many = mlp if isinstance(mlp, Experts) else None
    return (
        granite.keys(replace(c, attention=attention, position=a_rotary(c)))
        | mamba2_keys(c)
        | {
            "layer_types": types(c),
            "position_embedding_type": None if isinstance(c.position, NoPosition) else "rope",
            "num_local_experts": many.count if many else 0,
            "num_experts_per_tok": many.top_k if many else 2,
            "shared_intermediate_size": many.d_shared if many else mlp.width(c),
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from (row for row in without_attention(granitemoe.names(c), c) if ".mlp." not in str(row[0]))
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}", f"blocks.{i}"
        if isinstance(at(c.attention, i), Mamba2):
            yield from mamba2_names(f"{their}.mamba", f"{our}.attn")
        yield from linear(f"{their}.shared_mlp.input_linear", [f"{our}.mlp.gate", f"{our}.mlp.up"])
        yield from linear(f"{their}.shared_mlp.output_linear", f"{our}.mlp.down")
