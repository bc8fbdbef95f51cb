"""Command-R: PaLM's block and tied embeddings at Llama's proportions, and scaled logits (Cohere 2024)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, LayerNorm, Rotary, SelfAttention, SharedNorm, at
from onward.families import HF, Row, interleaved, llama, require, with_defaults
from onward.families._interleaved import neighbor_names
from onward.families.llama import shape

ARCHITECTURES = {"cohere": "CohereForCausalLM"}
SOURCE = "huggingface.co/CohereForAI/c4ai-command-r-v01"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "command-r-35b": {"rope_theta": 8_000_000.0},
    "command-r-plus-104b": shape(12_288, 33_792, 64, 96, 8)
    | {
        "rope_theta": 75_000_000.0,
        "logit_scale": 0.8333333333333334,
        "use_qk_norm": True,
    },
}
ANCESTORS = {"command-r": "palm-8b", "command-r-plus": "command-r-35b"}
DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22_528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 500_000.0,
}


def config(hf: HF) -> DecoderConfig:
    c = llama.config(with_defaults(hf, DEFAULTS))
    return replace(
        c,
        attention=replace(require(c.attention, SelfAttention), qk_norm="heads" if hf.get("use_qk_norm") else "none"),
        mlp=Gated(act=require(c.mlp, Gated).act),
        norm=LayerNorm(eps=hf.get("layer_norm_eps", 1e-5), bias=False),
        block=SharedNorm(),
        logit_scale=hf.get("logit_scale", 0.0625),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    attention = require(at(c.attention, 0), SelfAttention)
    return llama.keys(c) | {
        "attention_bias": attention.bias,
        "layer_norm_eps": require(c.norm, LayerNorm).eps,
        "logit_scale": c.logit_scale,
        "use_qk_norm": attention.qk_norm == "heads",
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from neighbor_names(c, llama.names(c))
    into, back = interleaved(c.d_head, require(c.position, Rotary).rope_dim(c.d_head))
    norms = lambda t: into(t.flatten()), lambda t: back(t).unflatten(0, (-1, c.d_head))  # stored as (H, d_head)
    for i in range(c.n_layers):
        for name, heads in ("q_norm", c.n_heads), ("k_norm", c.n_kv_heads):
            ours = [f"blocks.{i}.attn.{name}.{head}.weight" for head in range(heads)]
            yield f"model.layers.{i}.self_attn.{name}.weight", ours, norms
