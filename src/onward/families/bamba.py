"""Bamba: Llama with Mamba-2 in most layers, and half of each head rotated in the others (IBM 2024)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, Mamba2, RMSNorm, SelfAttention, at
from onward.families import HF, Row, llama, require, with_defaults
from onward.families._layers import FULL
from onward.families._recurrent import mamba2, mamba2_keys, mamba2_names, one, types, without_attention
from onward.families._rope import a_rotary
from onward.families.llama import shape

ARCHITECTURES = {"bamba": "BambaForCausalLM"}
SOURCE = "huggingface.co/blog/bamba"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"bamba-9b": {"vocab_size": 128_256, "mamba_d_state": 128, "attn_layer_indices": [9, 18, 27]}}
ANCESTORS = {"bamba": "llama-3.1-8b"}
DEFAULTS = shape(4096, 14_336, 32, 32, 8) | {
    "vocab_size": 128_000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
}


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c, full = llama.partly_rotated(given, fraction=0.5), hf.get("attn_layer_indices") or []
    mamba, attention = mamba2(given, require(c.norm, RMSNorm).eps), require(c.attention, SelfAttention)
    return replace(c, attention=tuple(attention if i in full else mamba for i in range(c.n_layers)))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    attention, mlp = one(c, SelfAttention, SelfAttention()), require(c.mlp, Gated)
    full = [i for i, kind in enumerate(types(c)) if kind == FULL]
    biases = {"attention_bias": attention.bias, "mlp_bias": mlp.bias}
    layout = {"attn_layer_indices": full, "partial_rotary_factor": a_rotary(c).fraction}
    return llama.keys(c) | mamba2_keys(c) | biases | layout


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, *ours in without_attention(llama.names(c), c):
        name = str(their).replace(".post_attention_layernorm", ".pre_ff_layernorm").replace(".mlp.", ".feed_forward.")
        yield name.replace("model.norm.", "model.final_layernorm."), *ours  # type: ignore[misc]
    for i in range(c.n_layers):
        if isinstance(at(c.attention, i), Mamba2):
            yield from mamba2_names(f"model.layers.{i}.mamba", f"blocks.{i}.attn")
