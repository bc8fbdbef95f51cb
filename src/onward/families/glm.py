"""GLM-4-9B: Llama with half of each head rotated, biases of q, k, v, and gates fused with up projections (GLM Team
2024)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.families import HF, Row, llama, require, with_defaults
from onward.families._interleaved import neighbor_names
from onward.families._rope import a_rotary
from onward.families.llama import shape

ARCHITECTURES = {"glm": "GlmForCausalLM"}
SOURCE = "arXiv:2406.12793"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"glm-4-9b": {}}
ANCESTORS = {"glm-4-": "llama-2-7b"}
DEFAULTS = shape(4096, 13_696, 40, 32, 2) | {
    "vocab_size": 151_552,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
}


def config(hf: HF) -> DecoderConfig:
    c = llama.partly_rotated(with_defaults(hf, DEFAULTS), fraction=0.5)
    attention = SelfAttention(bias=hf.get("attention_bias", True))
    return replace(c, attention=attention, mlp=Gated(act=require(c.mlp, Gated).act))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | {
        "partial_rotary_factor": a_rotary(c).fraction,
        "attention_bias": require(c.attention, SelfAttention).bias,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    for row in neighbor_names(c, llama.names(c)):
        if not str(row[0]).endswith(("gate_proj.weight", "up_proj.weight")):
            yield row
    for i in range(c.n_layers):
        ours = [f"blocks.{i}.mlp.{name}.weight" for name in ("gate", "up")]
        yield f"model.layers.{i}.mlp.gate_up_proj.weight", ours
