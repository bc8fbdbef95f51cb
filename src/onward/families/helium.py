"""Helium: Llama at 2B, whose files pair neighboring elements for rotation (Kyutai 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.families import HF, Row, llama, require, with_defaults
from onward.families._interleaved import neighbor_names
from onward.families.llama import shape

ARCHITECTURES = {"helium": "HeliumForCausalLM"}
SOURCE = "huggingface.co/kyutai/helium-1-preview"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"helium-1-preview-2b": {}}
ANCESTORS = {"helium": "llama-2-7b"}
DEFAULTS = shape(2560, 7040, 24, 20, 20) | {
    "vocab_size": 48_000,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "rope_theta": 100_000.0,
}


def config(hf: HF) -> DecoderConfig:
    c = llama.config(with_defaults(hf, DEFAULTS))
    return replace(c, attention=replace(require(c.attention, SelfAttention), out_bias=False))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    attention, mlp = require(c.attention, SelfAttention), require(c.mlp, Gated)
    return llama.keys(c) | {"attention_bias": attention.bias, "mlp_bias": mlp.bias}


def names(c: DecoderConfig) -> Iterator[Row]:
    return neighbor_names(c, llama.names(c))
