"""DeepSeek-V3.2: V3 with an indexer, which chooses the `index_topk` tokens that each token attends to (DeepSeek-AI
2025, "DeepSeek Sparse Attention"). In a context of at most so many tokens it chooses all of them: Onward reads the
models up to this length, without the indexer, and saves them as DeepSeek-V3."""

from dataclasses import dataclass, replace
from typing import Any

from onward.config.decoder import DecoderConfig, Rotary
from onward.config.part_types import ConfigFields
from onward.families import HF, Inexpressible, deepseek_v3, require, with_defaults

ARCHITECTURES = {"deepseek_v32": "DeepseekV32ForCausalLM"}
BASE = "model."
IGNORED = r"\.self_attn\.indexer\."
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = {"max_position_embeddings": 163_840}
INDEXER = "index_topk", "index_head_dim", "index_n_heads", "layer_types"
names = deepseek_v3.names


@dataclass(frozen=True)
class RotaryWithinIndex(Rotary, kind="rotary_within_index", internal=True):
    """Rotary positions below the context length only: beyond it, an indexer would choose tokens."""

    def limit(self, config: ConfigFields) -> float:
        return config.context_length


def config(hf: HF) -> DecoderConfig:
    return up_to_index(hf, deepseek_v3.config(with_defaults(hf, DEFAULTS)))


def up_to_index(hf: HF, c: DecoderConfig) -> DecoderConfig:
    """The decoder with a context of at most `index_topk` tokens, where its attention is that without an indexer."""
    for key in INDEXER:
        hf.get(key)  # reading them prevents a warning
    length = min(c.context_length, hf.get("index_topk", 2048))
    position = require(c.position, Rotary)
    bounded = RotaryWithinIndex(position.theta, position.fraction, position.scaling)
    return replace(c, context_length=length, position=bounded)


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    raise Inexpressible("without its indexer, the model is a deepseek_v3")
