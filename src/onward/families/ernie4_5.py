"""ERNIE 4.5, the dense model: a Llama whose biases are set by one key, with tied embeddings (Baidu 2025)."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import DecoderConfig, SelfAttention
from onward.families import HF, Row, llama, require, with_defaults
from onward.families._interleaved import neighbor_names
from onward.families.llama import shape

ARCHITECTURES = {"ernie4_5": "Ernie4_5ForCausalLM"}
SOURCE = "huggingface.co/baidu/ERNIE-4.5-0.3B-PT"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"ernie-4.5-0.3b": {}}
ANCESTORS = {"ernie-4.5": "llama-3.2-1b"}
DEFAULTS = shape(1024, 3072, 18, 16, 2) | {
    "vocab_size": 103_424,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}


def config(hf: HF) -> DecoderConfig:
    bias = hf.get("use_bias", False)
    return llama.config(with_defaults({"attention_bias": bias, "mlp_bias": bias}, with_defaults(hf, DEFAULTS)))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | {"use_bias": require(c.attention, SelfAttention).bias}


def names(c: DecoderConfig) -> Iterator[Row]:
    return neighbor_names(c, llama.names(c))
