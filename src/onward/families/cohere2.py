"""Command R7B and A: Command-R with windows, and no positions in every fourth layer, which attends to all tokens
(Cohere 2024)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, NoPosition, SelfAttention
from onward.families import HF, Row, cohere, llama, only, require, with_defaults
from onward.families._interleaved import neighbor_names
from onward.families._layers import layer_types, windowed_parts
from onward.families._rope import a_rotary
from onward.families.llama import shape

ARCHITECTURES = {"cohere2": "Cohere2ForCausalLM"}
SOURCE = "arXiv:2504.00698"
BASE = "model."
IGNORED = ""
BOTH = {"logit_scale": 0.25, "rope_theta": 50_000.0}
PRESETS: dict[str, HF] = {
    "command-r7b": BOTH | shape(4096, 14_336, 32, 32, 8),
    "command-a-111b": BOTH | shape(12_288, 36_864, 64, 96, 8) | {"max_position_embeddings": 131_072},
}
RELEASED = {  # keys in the released files, which transformers does not read
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
    "rotary_pct": 1.0,
    "use_parallel_block": True,
    "use_gated_activation": True,
    "use_embedding_sharing": True,
    "use_parallel_embedding": True,
}
ANCESTORS = {"command-r7b": "command-r-35b", "command-a": "command-r-plus-104b"}


def config(hf: HF) -> DecoderConfig:
    only(hf, use_qk_norm=False, **RELEASED)
    c = cohere.config(with_defaults(hf, {"rope_theta": 10_000.0}))
    pattern = hf.get("sliding_window_pattern", hf.get("layer_switch", 4))
    local = [(layer + 1) % pattern != 0 for layer in range(c.n_layers)]
    parts = windowed_parts(hf, require(c.attention, SelfAttention), hf.get("sliding_window", 4096), local)
    return replace(c, attention=parts, position=tuple(a_rotary(c) if part.window else NoPosition() for part in parts))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return cohere.to_hf(c) | layer_types(c)


def names(c: DecoderConfig) -> Iterator[Row]:
    return neighbor_names(c, llama.names(c))
