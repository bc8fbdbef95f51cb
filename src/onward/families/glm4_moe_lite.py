"""GLM 4.7 Flash: DeepSeek-V3 at a small size, with wide values (Z.ai 2026)."""

from typing import Any

from onward.config.decoder import DecoderConfig
from onward.families import HF, deepseek_v3, with_defaults
from onward.families._experts import dense_or_sparse
from onward.families._prediction import NUMBERED
from onward.families.llama import shape

ARCHITECTURES = {"glm4_moe_lite": "Glm4MoeLiteForCausalLM"}
SOURCE = "huggingface.co/zai-org/GLM-4.7-Flash"
BASE = "model."
IGNORED = ""
PREDICTION = NUMBERED
PRESETS: dict[str, HF] = {"glm-4.7-flash": {"rope_theta": 1e6}}
ANCESTORS = {"glm-4.7-flash": "deepseek-v3"}
DEFAULTS = shape(2048, 10_240, 47, 20, 20) | {
    "vocab_size": 154_880,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
}
names = deepseek_v3.names


def config(hf: HF) -> DecoderConfig:
    return deepseek_v3.config(with_defaults(hf, DEFAULTS))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return deepseek_v3.to_hf(c) | dense_or_sparse(c)
