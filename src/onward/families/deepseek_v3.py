"""DeepSeek-V3 and R1: V2 with sigmoid routing, balanced by a routing bias (DeepSeek-AI 2024)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from onward.base.fields import hints
from onward.config.decoder import DecoderConfig, LatentAttention
from onward.config.routing import SigmoidRouting
from onward.families import HF, Row, deepseek_v2, only, with_defaults
from onward.families._experts import ROUTER
from onward.families._prediction import NUMBERED
from onward.families.deepseek_v2 import YARN

ARCHITECTURES = {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"}
SOURCE = "arXiv:2412.19437, arXiv:2501.12948, arXiv:2507.20534"
BASE = "model."
IGNORED = ""
PREDICTION = NUMBERED
RELEASED = {
    "max_position_embeddings": 163_840,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
PRESETS: dict[str, HF] = {"deepseek-v3": RELEASED, "deepseek-r1": RELEASED}
ANCESTORS = {"deepseek-v3": "deepseek-v2", "deepseek-r1": "deepseek-v3"}
DEFAULTS = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}


@dataclass(frozen=True)
class LatentAttentionHalves(LatentAttention, kind="latent_halves", internal=True):
    """LatentAttention whose published weights pair rotated element i with i + d_rope / 2, as Onward does. Other
    DeepSeek files pair 2 i with 2 i + 1, and are reordered on loading. The computation is the same."""


def config(hf: HF) -> DecoderConfig:
    hf = with_defaults(hf, DEFAULTS)
    only(hf, scoring_func="sigmoid", topk_method="noaux_tc")
    only(hf, head_dim=hf.get("head_dim") and hf.get("qk_rope_head_dim", 64))  # transformers rotates this many elements
    return paired(hf, deepseek_v2.decoder(hf, SigmoidRouting(*(hf[key] for key in ROUTER))))


def paired(hf: HF, c: DecoderConfig) -> DecoderConfig:
    """The decoder with the pairs of rotated elements that `rope_interleave` selects."""
    if hf.get("rope_interleave", True):
        return c
    own = {name: getattr(c.attention, name) for name in hints(LatentAttentionHalves)}
    return replace(c, attention=LatentAttentionHalves(**own))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    interleaved = not isinstance(c.attention, LatentAttentionHalves)
    return deepseek_v2.to_hf(c) | {"topk_method": "noaux_tc", "rope_interleave": interleaved}


def names(c: DecoderConfig) -> Iterator[Row]:
    for row in deepseek_v2.names(c):
        yield row[:2] if isinstance(c.attention, LatentAttentionHalves) else row
