"""Qwen 2 and 2.5: Llama with biases of queries, keys and values, and optional windows in the later layers (Yang et al.
2024)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.families import HF, llama, require, with_defaults
from onward.families._layers import layer_types, windowed_parts
from onward.families.llama import shape

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM"}
SOURCE = "arXiv:2407.10671, arXiv:2412.15115"
BASE = "model."
IGNORED = ""
LONG = {"max_position_embeddings": 131_072, "rope_theta": 1e6}
SMALL = LONG | {"tie_word_embeddings": True}
LARGE = LONG | {"vocab_size": 152_064}
QWEN_2 = {
    "0.5b": SMALL | shape(896, 4864, 24, 14, 2),
    "1.5b": SMALL | shape(1536, 8960, 28, 12, 2),
    "7b": LARGE | shape(3584, 18_944, 28, 28, 4),
    "72b": LARGE | shape(8192, 29_568, 80, 64, 8) | {"rms_norm_eps": 1e-5},
}
QWEN_25 = QWEN_2 | {
    "0.5b": QWEN_2["0.5b"] | {"max_position_embeddings": 32_768},
    "3b": SMALL | shape(2048, 11_008, 36, 16, 2) | {"max_position_embeddings": 32_768},
    "14b": LARGE | shape(5120, 13_824, 48, 40, 8) | {"rms_norm_eps": 1e-5},
    "32b": LARGE | shape(5120, 27_648, 64, 40, 8) | {"rms_norm_eps": 1e-5},
}
PRESETS: dict[str, HF] = {
    **{f"qwen2-{size}": published for size, published in QWEN_2.items()},
    **{f"qwen2.5-{size}": published for size, published in QWEN_25.items()},
}
ANCESTORS = {"qwen2-": "llama-2-7b", "qwen2.5-": "qwen2-7b"}
DEFAULTS = {
    "vocab_size": 151_936,
    "num_key_value_heads": 32,
    "intermediate_size": 22_016,
    "max_position_embeddings": 32_768,
}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    c = llama.config(with_defaults(hf, DEFAULTS))
    return replace(
        c, attention=windowed(hf, SelfAttention(bias=True), c.n_layers), mlp=Gated(act=require(c.mlp, Gated).act)
    )


def windowed(hf: HF, part: SelfAttention, layers: int) -> SelfAttention | tuple[SelfAttention, ...]:
    """Return `part` for each layer, with a sliding window, if used, in the layers given by `layer_types` or from
    `max_window_layers` on."""
    return spread(hf, part, layers, lambda layer: layer >= hf.get("max_window_layers", 28))


def spread(
    hf: HF, part: SelfAttention, layers: int, local: Callable[[int], bool]
) -> SelfAttention | tuple[SelfAttention, ...]:
    """Return `part` for each layer, with a sliding window, if used, in the layers given by `layer_types` or, without
    it, by `local(layer)`."""
    size = hf.get("sliding_window", 4096)  # releases without windows have this key, too
    window = size if hf.get("use_sliding_window", False) else None
    return windowed_parts(hf, part, window, [local(layer) for layer in range(layers)])


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    layers = layer_types(c)
    return llama.keys(c) | {"sliding_window": None} | layers | {"use_sliding_window": "sliding_window" in layers}
