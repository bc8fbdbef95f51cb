"""EXAONE 4: OLMo 2 with q/k norms per head; at 32B, only layers with a window have positions (LG 2025)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import BranchNorm, DecoderConfig, Gated, NoPosition, Rotary, SelfAttention, at
from onward.families import HF, llama, olmo2, require, with_defaults
from onward.families._layers import layer_types, windowed_parts
from onward.families._rope import a_rotary
from onward.families.llama import shape, stretched

ARCHITECTURES = {"exaone4": "Exaone4ForCausalLM"}
SOURCE = "arXiv:2507.11407"
BASE = "model."
IGNORED = ""
BOTH = stretched(16.0) | {"rope_theta": 1e6}
PRESETS: dict[str, HF] = {
    "exaone-4.0-1.2b": BOTH
    | shape(2048, 4096, 30, 32, 8)
    | {
        "max_position_embeddings": 65_536,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 30,
        "tie_word_embeddings": True,
    },
    "exaone-4.0-32b": BOTH | shape(5120, 27_392, 64, 40, 8),
}
ANCESTORS = {"exaone-4.0": "olmo-2-1b", "exaone-4.0-32b": "olmo-2-32b"}
DEFAULTS = {"vocab_size": 102_400, "intermediate_size": 16_384, "rms_norm_eps": 1e-5, "num_key_value_heads": 32}
names = olmo2.names


def config(hf: HF) -> DecoderConfig:
    return replace(pre_norm(hf), block=BranchNorm())


def pre_norm(hf: HF) -> DecoderConfig:
    """Return EXAONE 4 with norms before the branches. Without windows, all layers have rotary positions."""
    c = llama.config(with_defaults(hf, DEFAULTS))
    window, part = hf.get("sliding_window", 4096), SelfAttention(qk_norm="head")
    pattern = hf.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):  # "LLLG" in the first files: local and global layers, the last layer always global
        local = [layer < c.n_layers - 1 and pattern[layer % len(pattern)] == "L" for layer in range(c.n_layers)]
    else:
        local = [bool(window and (layer + 1) % pattern) for layer in range(c.n_layers)]
    parts = windowed_parts(hf, part, window, local)
    return replace(
        c,
        attention=parts,
        position=tuple(a_rotary(c) if part.window or window is None else NoPosition() for part in parts),
        mlp=Gated(act=require(c.mlp, Gated).act),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    layers = layer_types(c)
    everywhere = "sliding_window" not in layers and isinstance(at(c.position, 0), Rotary)
    return llama.keys(c) | layers | ({"sliding_window": None} if everywhere else {})
