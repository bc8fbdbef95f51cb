"""StableLM: Llama with LayerNorm, and rotary positions on a quarter of each head (Bellagente et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onward.config.decoder import DecoderConfig, Gated, LayerNorm, PreNorm, Rotary, SelfAttention, SharedNorm
from onward.families import ACTIVATIONS, HF, Row, activation, llama, require, sizes, with_defaults
from onward.families._rope import rope, rotary
from onward.families.llama import shape

if TYPE_CHECKING:
    pass

ARCHITECTURES = {"stablelm": "StableLmForCausalLM"}
SOURCE = "arXiv:2402.17834, huggingface.co/stabilityai/stablelm-3b-4e1t"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "stablelm-3b-4e1t": {},
    "stablelm-2-1.6b": shape(2048, 5632, 24, 32, 32) | {"vocab_size": 100_352, "use_qkv_bias": True},
    "stablelm-2-12b": shape(5120, 13_824, 40, 32, 8)
    | {"vocab_size": 100_352, "qk_layernorm": True, "use_parallel_residual": True},
}
ANCESTORS = {"stablelm": "llama-7b", "stablelm-2": "stablelm-3b-4e1t"}
SIZES = {our: key for our, key in llama.SIZES.items() if our != "d_head"} | {"dropout": ("hidden_dropout", 0.0)}
DEFAULTS = shape(2560, 6912, 32, 32, 32) | {"vocab_size": 50_304, "max_position_embeddings": 4096}


def config(hf: HF) -> DecoderConfig:
    keys = with_defaults(hf, DEFAULTS)
    act: Any = hf.get("hidden_act", "silu")
    norm = LayerNorm(eps=hf.get("layer_norm_eps", 1e-5))
    attention = SelfAttention(bias=hf.get("use_qkv_bias", False))
    if hf.get("qk_layernorm"):
        attention = replace(attention, qk_norm="heads", qk_norm_part=replace(norm, bias=False))
    return DecoderConfig(
        **sizes(keys, SIZES),
        position=rotary(hf, context=keys["max_position_embeddings"], fraction=0.25),
        attention=attention,
        mlp=Gated(act=ACTIVATIONS.get(act, act)),
        norm=norm,
        block=SharedNorm() if hf.get("use_parallel_residual") else PreNorm(),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    position, attention = require(c.position, Rotary), require(c.attention, SelfAttention)
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        **rope(position),
        "partial_rotary_factor": position.fraction,
        "attention_dropout": c.dropout,
        "use_qkv_bias": attention.bias,
        "qk_layernorm": attention.qk_norm == "heads",
        "use_parallel_residual": isinstance(c.block, SharedNorm),
        "hidden_act": activation(c.mlp),
        "layer_norm_eps": require(c.norm, LayerNorm).eps,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    for i in range(c.n_layers):
        for name, heads in ("q", c.n_heads), ("k", c.n_kv_heads):
            for head in range(heads):
                their = f"model.layers.{i}.self_attn.{name}_layernorm.norms.{head}.weight"
                yield their, f"blocks.{i}.attn.{name}_norm.{head}.weight"
