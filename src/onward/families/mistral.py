"""Mistral: Llama 2 with grouped heads and, in its first release, a sliding window (Jiang et al. 2023)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.families import HF, llama, require, with_defaults
from onward.families._layers import windowed_parts
from onward.families.llama import shape

ARCHITECTURES = {"mistral": "MistralForCausalLM"}
SOURCE = "arXiv:2310.06825"
BASE = "model."
IGNORED = ""
B7 = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5}
WIDE = B7 | {"vocab_size": 131_072, "head_dim": 128, "sliding_window": None}
PRESETS: dict[str, HF] = {
    "mistral-7b": B7,
    "mistral-7b-v0.3": B7 | {"vocab_size": 32_768, "sliding_window": None, "rope_theta": 1e6},
    "mistral-nemo-12b": WIDE | shape(5120, 14_336, 40, 32, 8) | {"max_position_embeddings": 131_072, "rope_theta": 1e6},
    "mistral-small-24b": WIDE | shape(5120, 32_768, 40, 32, 8) | {"rope_theta": 1e8},
    "ministral-8b": WIDE | shape(4096, 12_288, 36, 32, 8) | {"sliding_window": 32_768, "rope_theta": 1e8},
}
ANCESTORS = {
    "mistral-7b": "llama-2-7b",
    "mistral-7b-v0.3": "mistral-7b",
    "mistral-nemo": "mistral-7b-v0.3",
    "mistral-small": "mistral-nemo-12b",
    "ministral": "mistral-7b",
}
DEFAULTS = {"num_key_value_heads": 8, "intermediate_size": 14_336, "max_position_embeddings": 131_072}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    c = uniform(hf)
    if "layer_types" not in hf:
        return c
    window = hf.get("sliding_window", 4096)  # Ministral
    return replace(c, attention=windowed_parts(hf, SelfAttention(), window, [window is not None] * c.n_layers))


def uniform(hf: HF) -> DecoderConfig:
    """Return the decoder with the same window in each layer, regardless of layer_types."""
    c = llama.config(with_defaults(hf, DEFAULTS))
    return replace(
        c, attention=SelfAttention(window=hf.get("sliding_window", 4096) or 0), mlp=Gated(act=require(c.mlp, Gated).act)
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | {"sliding_window": require(c.attention, SelfAttention).window or None}
