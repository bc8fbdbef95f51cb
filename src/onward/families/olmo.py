"""OLMo (Groeneveld et al. 2024): Llama with LayerNorms without weights or biases, and in some releases clipped queries,
keys and values."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, LayerNorm, SelfAttention
from onward.families import HF, llama, require, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"olmo": "OlmoForCausalLM"}
SOURCE = "arXiv:2402.00838"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "olmo-1b": shape(2048, 8192, 16, 16, 16) | {"tie_word_embeddings": True},
    "olmo-7b": {},
}
ANCESTORS = {"olmo-1b": "llama-7b", "olmo-7b": "llama-7b"}
DEFAULTS = {"vocab_size": 50_304}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    c = llama.config(with_defaults(hf, DEFAULTS))
    return replace(
        c,
        attention=replace(require(c.attention, SelfAttention), clip=hf.get("clip_qkv")),
        mlp=Gated(act=require(c.mlp, Gated).act),
        norm=LayerNorm(weight=False, bias=False),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    attention = require(c.attention, SelfAttention)
    return llama.keys(c) | {"attention_bias": attention.bias, "clip_qkv": attention.clip}
