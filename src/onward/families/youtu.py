"""Youtu-LLM: a small dense DeepSeek-V3, with tied embeddings (Tencent 2025)."""

from typing import Any

from onward.config.decoder import DecoderConfig
from onward.families import HF, deepseek_v3, with_defaults
from onward.families._experts import mixture_keys
from onward.families.llama import shape

ARCHITECTURES = {"youtu": "YoutuForCausalLM"}
SOURCE = "arXiv:2512.24618"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(2048, 6144, 32, 16, 16) | {
    "vocab_size": 128_256,
    "q_lora_rank": 1536,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
names = deepseek_v3.names


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    return deepseek_v3.config(with_defaults({"first_k_dense_replace": given["num_hidden_layers"]}, given))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return {key: value for key, value in deepseek_v3.to_hf(c).items() if key not in (*mixture_keys(c), "topk_method")}
