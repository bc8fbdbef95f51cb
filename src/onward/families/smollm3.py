"""SmolLM 3: Llama 3 without positions in every fourth layer (Bakouch et al. 2025)."""

from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, Gated, NoPosition, Rotary, SelfAttention, at
from onward.families import HF, llama, qwen2, require, with_defaults

ARCHITECTURES = {"smollm3": "SmolLM3ForCausalLM"}
SOURCE = "huggingface.co/HuggingFaceTB/SmolLM3-3B"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"smollm3-3b": {"max_position_embeddings": 65_536, "rope_theta": 5e6}}
ANCESTORS = {"smollm3": "llama-3.2-3b"}
DEFAULTS = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rope_theta": 2e6,
    "sliding_window": None,
}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(given)
    rotated = hf.get("no_rope_layers")
    if rotated is None:
        rotated = [(layer + 1) % hf.get("no_rope_layer_interval", 4) for layer in range(c.n_layers)]
    rotary, attention = require(c.position, Rotary), require(c.attention, SelfAttention)
    if len(rotated) != c.n_layers:
        raise UserError(
            f"config.json has no_rope_layers for {len(rotated)} of {c.n_layers} layers: give one value per layer"
        )
    rotated = list(map(bool, rotated))
    return replace(
        c,
        position=tuple(rotary if rotated else NoPosition() for rotated in rotated),
        attention=qwen2.spread(given, attention, c.n_layers, lambda layer: not rotated[layer]),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return qwen2.to_hf(c) | {
        "no_rope_layers": [int(isinstance(at(c.position, layer), Rotary)) for layer in range(c.n_layers)],
        "attention_bias": require(at(c.attention, 0), SelfAttention).bias,
        "mlp_bias": require(at(c.mlp, 0), Gated).bias,
    }
